//! Real sizes of queues, often larger than the sizes that a program asks for. A program that
//! confuses the two fails here, not only on real hardware.
//!
//! mlx5 fills whole blocks: `mlx5_calc_send_wqe`, `mlx5_calc_sq_size`, `mlx5_calc_rq_size` (for a
//! reliable connection) and `create_cq` of rdma-core's providers/mlx5/verbs.c.

use crate::os::shm::{INLINE_BYTES, SEND_SLOTS};
use crate::queue_pair::MAX_RECEIVES;
use std::ffi::c_int;
use verbs_sys::ibv_qp_cap;

/// Size of a request without its data: a control segment, and room for the largest operation, the
/// binding of a memory window (`sq_overhead`: 16 + 48 + 64 + 64).
const OVERHEAD_BYTES: u32 = 192;
/// Size of `struct mlx5_wqe_inl_data_seg`, which precedes the inline bytes in a request.
const INLINE_HEAD_BYTES: u32 = 4;
/// Size of `struct mlx5_wqe_data_seg`: one scatter/gather entry in a request.
const SEGMENT_BYTES: u32 = 16;
/// Size of the blocks of which mlx5's send queues consist, `MLX5_SEND_WQE_BB`.
const BLOCK_BYTES: u32 = 64;

/// Returns a queue pair's real sizes. `asked` must be within this fabric's limits, as
/// `ibv_create_qp` checks. The result is within these limits too.
pub fn rounded_up(asked: ibv_qp_cap) -> ibv_qp_cap {
    let mut got = asked;
    if asked.max_send_wr > 0 {
        let inline = match asked.max_inline_data {
            0 => 0,
            bytes => (INLINE_HEAD_BYTES + bytes).next_multiple_of(SEGMENT_BYTES),
        };
        let data = inline.max(asked.max_send_sge * SEGMENT_BYTES);
        let request = (OVERHEAD_BYTES + data).next_multiple_of(BLOCK_BYTES);
        got.max_inline_data =
            (request - OVERHEAD_BYTES - INLINE_HEAD_BYTES).min(INLINE_BYTES as u32);
        got.max_send_wr =
            ((asked.max_send_wr * request).next_power_of_two() / request).min(SEND_SLOTS as u32);
    }
    if asked.max_recv_wr > 0 {
        let request = (asked.max_recv_sge.max(1) * SEGMENT_BYTES).next_power_of_two();
        let queue = (asked.max_recv_wr.next_power_of_two() * request).max(BLOCK_BYTES);
        got.max_recv_wr = (queue / request).min(MAX_RECEIVES);
    }
    got
}

/// Returns a completion queue's real size. mlx5 rounds `entries` plus one up to a power of two
/// (`align_queue_size` in rdma-core's providers/mlx5/mlx5.h), and keeps one place empty.
pub fn completions_for(entries: c_int) -> c_int {
    // mlx5's `create_cq` accepts up to 2^24 places. The result needs no such limit, because
    // `ibv_create_cq` accepts fewer entries.
    (u32::try_from(entries).unwrap_or(0) + 1)
        .next_power_of_two()
        .cast_signed()
        - 1
}

#[cfg(test)]
mod tests {
    use super::super::attributes::MAX_CQE;
    use super::*;

    fn got(send: u32, receive: u32, inline: u32) -> (u32, u32, u32) {
        let got = rounded_up(ibv_qp_cap {
            max_send_wr: send,
            max_recv_wr: receive,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: inline,
        });
        assert_eq!((got.max_send_sge, got.max_recv_sge), (1, 1));
        (got.max_send_wr, got.max_recv_wr, got.max_inline_data)
    }

    #[test]
    fn queues_are_filled_as_mlx5_fills_them() {
        assert_eq!(got(128, 1, 128), (170, 4, 188));
        assert_eq!(got(128, 320, 64), (204, 512, 124));
        assert_eq!(
            got(1, 1, 0),
            (1, 4, 60),
            "room for one segment is room for so many bytes"
        );
        assert_eq!(got(0, 0, 0), (0, 0, 0), "nothing stays nothing");
    }

    #[test]
    fn a_completion_queue_has_a_power_of_two_minus_one_entries() {
        for (asked, given) in [
            (1, 1),
            (2, 3),
            (3, 3),
            (4, 7),
            (448, 511),
            (896, 1023),
            (1023, 1023),
            (1024, 2047),
        ] {
            assert_eq!(completions_for(asked), given, "{asked}");
        }
        assert_eq!(completions_for(MAX_CQE), 2 * MAX_CQE - 1);
    }

    #[test]
    fn requests_get_at_least_what_they_ask_for_within_the_limit() {
        for send in [1, 2, 100, 1023, 1024] {
            for inline in [0, 1, 60, 61, 252, 256] {
                let (sends, receives, bytes) = got(send, MAX_RECEIVES, inline);
                assert!(
                    (send..=SEND_SLOTS as u32).contains(&sends),
                    "{send} {inline}: {sends}"
                );
                assert!(
                    (inline..=INLINE_BYTES as u32).contains(&bytes),
                    "{send} {inline}: {bytes}"
                );
                assert_eq!(receives, MAX_RECEIVES);
            }
        }
    }
}
