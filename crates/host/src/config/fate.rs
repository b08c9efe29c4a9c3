//! Whether the plugin reads or ignores a variable of NCCL's own network transport.

use super::nccl::ignored;
use super::{SettingRow, TABLE};

/// Treatment of an NCCL variable.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// The plugin reads the variable.
    Honoured(&'static SettingRow),
    /// The plugin ignores the variable. Contains the reason, as the end of a sentence.
    Ignored(&'static str),
}

/// Returns the treatment of the variable `name`. `None` if neither the plugin nor NCCL's own
/// network transport reads the variable.
pub fn fate(name: &str) -> Option<Fate> {
    let row = TABLE
        .iter()
        .find(|row| row.name == name)
        .map(Fate::Honoured);
    row.or_else(|| {
        ignored()
            .find(|(known, _)| *known == name)
            .map(|(_, why)| Fate::Ignored(why))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_read_or_ignored_and_never_both() {
        let all: Vec<_> = ignored().collect();
        for (at, (name, why)) in all.iter().enumerate() {
            assert!(
                !TABLE.iter().any(|row| row.name == *name),
                "{name} is a setting: take it out of this list"
            );
            assert!(
                !all[..at].iter().any(|(other, _)| other == name),
                "{name} is there twice"
            );
            assert!(!why.ends_with('.') && why.len() > 20, "{name}: {why}");
        }
        assert!(
            matches!(fate("NCCL_IB_TIMEOUT"), Some(Fate::Honoured(row)) if row.default == "14")
        );
        assert!(
            matches!(fate("NCCL_IB_DISABLE"), Some(Fate::Ignored(why)) if why.contains("NCCL_NET=Socket"))
        );
        assert!(fate("NCCL_BUFFSIZE").is_none());
    }

    /// All `NCCL_IB_` names in the sources of NCCL 2.27.3, 2.28.9, 2.29.7, 2.30.3 and 2.30.7,
    /// and those in the library of 2.32.3.
    #[test]
    fn every_variable_of_nccls_ib_transport_has_a_fate() {
        let names = "ADAPTIVE_ROUTING ADDR_FAMILY ADDR_RANGE AR_THRESHOLD DATA_DIRECT DEVICE_PCI_ORDER DISABLE ECE_ENABLE FIFO_TC \
                     GID_INDEX HCA MERGE_NICS MERGE_VFS MQP_RETRY_ALL MQP_RETRY_CNT MQP_RETRY_SLEEP_MSEC OOO_RQ PCI_RELAXED_ORDERING \
                     PKEY PREPOST_RECEIVE_WORK_REQUESTS QPS_PER_CONNECTION QUERY_PORT_SPEED RECEIVER_SIDE_MATCHING_SCHEME \
                     RESILIENCY_PORT_FAILOVER RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS RESILIENCY_PORT_FAILOVER_PROBE_DELAY \
                     RESILIENCY_PORT_RECOVERY RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT \
                     RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE \
                     RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT \
                     RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX RESILIENCY_PORT_RECOVERY_START_DELAY RETRY_CNT RETURN_ASYNC_EVENTS \
                     ROCE_VERSION_NUM ROUTABLE_FLID_GID_INDEX SL SPLIT_DATA_ON_QPS SUBNET_AWARE_ROUTING SUBNET_PREFIX_LEN TC TIMEOUT \
                     USE_INLINE WARN_RAIL_LOCAL EVENT_BASED_LB EVENT_BASED_LB_REMOTE PKEY_VALUE RAIL_POLICY SORT_MERGE_NICS \
                     VR_RAILS_PER_SOCKET VR_SOCKET_COUNT WQE_LATENCY_REPORT WQE_LATENCY_THRESHOLD_NS";
        assert_eq!(names.split_whitespace().count(), 55);
        for name in names.split_whitespace() {
            assert!(fate(&format!("NCCL_IB_{name}")).is_some(), "NCCL_IB_{name}");
        }
    }
}
