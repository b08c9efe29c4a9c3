//! Attributes that each state change of a queue pair requires and allows, with their ranges, for
//! reliable connections (InfiniBand specification, 11.2.5.2, table 96).

use super::attributes::MAX_READS;
use verbs_sys::*;

#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) gids: usize,
    pub(super) mtu_bytes: u32,
}

/// Largest number of a queue pair or of a packet. Both numbers have 24 bits.
const MAX_24_BITS: u32 = 0xff_ffff;

struct Rule {
    from: ibv_qp_state,
    to: ibv_qp_state,
    required: u32,
    optional: u32,
}

const RULES: [Rule; 7] = [
    Rule {
        from: IBV_QPS_RESET,
        to: IBV_QPS_INIT,
        required: IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        optional: 0,
    },
    Rule {
        from: IBV_QPS_INIT,
        to: IBV_QPS_INIT,
        required: 0,
        optional: IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    },
    Rule {
        from: IBV_QPS_INIT,
        to: IBV_QPS_RTR,
        required: IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER,
        optional: IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
    },
    Rule {
        from: IBV_QPS_RTR,
        to: IBV_QPS_RTS,
        required: IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC,
        optional: IBV_QP_CUR_STATE
            | IBV_QP_ALT_PATH
            | IBV_QP_ACCESS_FLAGS
            | IBV_QP_MIN_RNR_TIMER
            | IBV_QP_PATH_MIG_STATE,
    },
    Rule {
        from: IBV_QPS_RTS,
        to: IBV_QPS_RTS,
        required: 0,
        optional: IBV_QP_CUR_STATE
            | IBV_QP_ACCESS_FLAGS
            | IBV_QP_ALT_PATH
            | IBV_QP_PATH_MIG_STATE
            | IBV_QP_MIN_RNR_TIMER,
    },
    Rule {
        from: IBV_QPS_RESET,
        to: IBV_QPS_RESET,
        required: 0,
        optional: 0,
    },
    Rule {
        from: IBV_QPS_ERR,
        to: IBV_QPS_ERR,
        required: 0,
        optional: 0,
    },
];

/// Fails with `EINVAL` if that state change does not exist, or if `mask` lacks a required attribute
/// or has one that is not allowed.
pub(super) fn permitted(from: ibv_qp_state, to: ibv_qp_state, mask: u32) -> Result<(), i32> {
    let mask = mask & !IBV_QP_STATE;
    // Every state can change to reset. Every state except reset can change to error; in reset no
    // request is outstanding that could fail. Neither change takes attributes.
    if to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET) {
        return if mask == 0 { Ok(()) } else { Err(libc::EINVAL) };
    }
    let rule = RULES
        .iter()
        .find(|rule| rule.from == from && rule.to == to)
        .ok_or(libc::EINVAL)?;
    let complete = mask & rule.required == rule.required;
    let nothing_else = mask & !(rule.required | rule.optional) == 0;
    if complete && nothing_else {
        Ok(())
    } else {
        Err(libc::EINVAL)
    }
}

/// Fails with `EINVAL` if an attribute in `mask` has a value out of range. Fails with `EOPNOTSUPP`
/// if `mask` has an attribute of a second (alternate) path.
pub(super) fn in_range(given: &ibv_qp_attr, mask: u32, bounds: Bounds) -> Result<(), i32> {
    if mask & (IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let av = &given.ah_attr;
    let checks = [
        (IBV_QP_PORT, given.port_num == 1),
        (IBV_QP_PKEY_INDEX, given.pkey_index == 0),
        // RoCE has only GIDs as addresses.
        (
            IBV_QP_AV,
            av.is_global == 1 && av.port_num == 1 && usize::from(av.grh.sgid_index) < bounds.gids,
        ),
        (
            IBV_QP_PATH_MTU,
            mtu_bytes(given.path_mtu).is_some_and(|bytes| bytes <= bounds.mtu_bytes),
        ),
        (IBV_QP_DEST_QPN, given.dest_qp_num <= MAX_24_BITS),
        (
            IBV_QP_MAX_DEST_RD_ATOMIC,
            given.max_dest_rd_atomic <= MAX_READS,
        ),
        (IBV_QP_MAX_QP_RD_ATOMIC, given.max_rd_atomic <= MAX_READS),
        (IBV_QP_MIN_RNR_TIMER, given.min_rnr_timer <= 31),
        (IBV_QP_TIMEOUT, given.timeout <= 31),
        (IBV_QP_RETRY_CNT, given.retry_cnt <= 7),
        (IBV_QP_RNR_RETRY, given.rnr_retry <= 7),
    ];
    let wrong = checks
        .iter()
        .any(|(attribute, possible)| mask & attribute != 0 && !possible);
    if wrong { Err(libc::EINVAL) } else { Ok(()) }
}

pub(super) fn merged(before: &ibv_qp_attr, given: &ibv_qp_attr, mask: u32) -> ibv_qp_attr {
    let mut after = *before;
    macro_rules! take {
        ($($attribute:ident: $field:ident;)*) => {$(
            if mask & $attribute != 0 {
                after.$field = given.$field;
            }
        )*};
    }
    take! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_DEST_QPN: dest_qp_num;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
    }
    if mask & IBV_QP_RQ_PSN != 0 {
        after.rq_psn = given.rq_psn & MAX_24_BITS;
    }
    if mask & IBV_QP_SQ_PSN != 0 {
        after.sq_psn = given.sq_psn & MAX_24_BITS;
    }
    after
}

pub(super) fn mtu_bytes(code: ibv_mtu) -> Option<u32> {
    (IBV_MTU_256..=IBV_MTU_4096)
        .contains(&code)
        .then(|| 128 << code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INIT: u32 = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const RTR: u32 = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    const RTS: u32 = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;

    #[test]
    fn the_usual_transitions_to_rts_are_allowed() {
        assert_eq!(permitted(IBV_QPS_RESET, IBV_QPS_INIT, INIT), Ok(()));
        assert_eq!(permitted(IBV_QPS_INIT, IBV_QPS_RTR, RTR), Ok(()));
        assert_eq!(permitted(IBV_QPS_RTR, IBV_QPS_RTS, RTS), Ok(()));
        assert_eq!(permitted(IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE), Ok(()));
        assert_eq!(permitted(IBV_QPS_ERR, IBV_QPS_RESET, IBV_QP_STATE), Ok(()));
    }

    #[test]
    fn each_required_attribute_is_required() {
        for (from, to, mask) in [
            (IBV_QPS_RESET, IBV_QPS_INIT, INIT),
            (IBV_QPS_INIT, IBV_QPS_RTR, RTR),
            (IBV_QPS_RTR, IBV_QPS_RTS, RTS),
        ] {
            for bit in (0..32)
                .map(|bit| 1 << bit)
                .filter(|bit| mask & bit != 0 && *bit != IBV_QP_STATE)
            {
                assert_eq!(
                    permitted(from, to, mask & !bit),
                    Err(libc::EINVAL),
                    "{from} to {to} without {bit:#x}"
                );
            }
        }
    }

    #[test]
    fn wrong_attributes_and_skipped_states_are_refused() {
        assert_eq!(
            permitted(IBV_QPS_RESET, IBV_QPS_INIT, INIT | IBV_QP_QKEY),
            Err(libc::EINVAL)
        );
        assert_eq!(
            permitted(IBV_QPS_INIT, IBV_QPS_RTR, RTR | IBV_QP_TIMEOUT),
            Err(libc::EINVAL)
        );
        assert_eq!(
            permitted(IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_PORT),
            Err(libc::EINVAL)
        );
        assert_eq!(
            permitted(IBV_QPS_RESET, IBV_QPS_RTR, RTR),
            Err(libc::EINVAL)
        );
        assert_eq!(permitted(IBV_QPS_INIT, IBV_QPS_RTS, RTS), Err(libc::EINVAL));
        assert_eq!(permitted(IBV_QPS_ERR, IBV_QPS_RTS, RTS), Err(libc::EINVAL));
        assert_eq!(
            permitted(IBV_QPS_RESET, IBV_QPS_ERR, IBV_QP_STATE),
            Err(libc::EINVAL)
        );
        assert_eq!(
            permitted(IBV_QPS_RTS, IBV_QPS_SQD, IBV_QP_STATE),
            Err(libc::EINVAL)
        );
    }

    #[test]
    fn values_are_checked_only_where_they_are_given() {
        let bounds = Bounds {
            gids: 2,
            mtu_bytes: 2048,
        };
        // SAFETY: integers and a union of integers, for which zero is a value.
        let zero: ibv_qp_attr = unsafe { std::mem::zeroed() };
        assert_eq!(in_range(&zero, IBV_QP_STATE, bounds), Ok(()));
        assert_eq!(
            in_range(&zero, IBV_QP_PORT, bounds),
            Err(libc::EINVAL),
            "ports count from 1"
        );
        let refused = |mask, change: fn(&mut ibv_qp_attr)| {
            let mut given = zero;
            (given.port_num, given.path_mtu) = (1, IBV_MTU_2048);
            (
                given.ah_attr.is_global,
                given.ah_attr.port_num,
                given.ah_attr.grh.sgid_index,
            ) = (1, 1, 1);
            assert_eq!(
                in_range(&given, mask, bounds),
                Ok(()),
                "the values of {mask:#x} before the change"
            );
            change(&mut given);
            assert_eq!(
                in_range(&given, mask, bounds),
                Err(libc::EINVAL),
                "{mask:#x}"
            );
        };
        refused(IBV_QP_PATH_MTU, |given| given.path_mtu = IBV_MTU_4096);
        refused(IBV_QP_PATH_MTU, |given| given.path_mtu = 0);
        refused(IBV_QP_AV, |given| given.ah_attr.is_global = 0);
        refused(IBV_QP_AV, |given| given.ah_attr.grh.sgid_index = 2);
        refused(IBV_QP_DEST_QPN, |given| given.dest_qp_num = 1 << 24);
        refused(IBV_QP_TIMEOUT, |given| given.timeout = 32);
        refused(IBV_QP_RETRY_CNT, |given| given.retry_cnt = 8);
        refused(IBV_QP_RNR_RETRY, |given| given.rnr_retry = 8);
        refused(IBV_QP_MAX_QP_RD_ATOMIC, |given| {
            given.max_rd_atomic = MAX_READS + 1
        });
        assert_eq!(
            in_range(&zero, IBV_QP_ALT_PATH, bounds),
            Err(libc::EOPNOTSUPP)
        );
    }

    #[test]
    fn a_change_sets_the_given_values_and_keeps_the_rest() {
        // SAFETY: integers and unions of integers, for which zero is a value.
        let (mut before, mut given): (ibv_qp_attr, ibv_qp_attr) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        (before.timeout, before.retry_cnt) = (14, 7);
        (given.timeout, given.retry_cnt, given.sq_psn) = (20, 3, 0xff00_0001);
        let after = merged(&before, &given, IBV_QP_TIMEOUT | IBV_QP_SQ_PSN);
        assert_eq!((after.timeout, after.retry_cnt, after.sq_psn), (20, 7, 1));
    }
}
