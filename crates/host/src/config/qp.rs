//! Settings of queue pairs, and the time without acknowledgement until a rail counts as lost.

use std::time::Duration;

/// A longer [`QpConfig::silence_limit`] causes a warning, as docs/guide/failover.md promises.
const PROMISED: Duration = Duration::from_secs(1);
/// With fewer retransmissions than this, a few lost packets make a rail count as lost.
pub const ENOUGH_RETRIES: u8 = 3;

/// Settings of queue pairs.
#[derive(Debug, Clone, Copy, Default)]
pub struct QpConfig {
    /// `NCCL_IB_TIMEOUT`: a queue pair waits 4.096 us x 2^timeout for an acknowledgement. The
    /// setting can be 1 to 31. Queue pairs also take 0, which means no limit.
    pub timeout: u8,
    /// `NCCL_IB_RETRY_CNT`: retransmissions before a queue pair fails; 0 to 7.
    pub retry_count: u8,
    /// `NCCL_SPARK_FLOW_LABEL`; 0: the driver computes one.
    pub flow_label: u32,
}

impl QpConfig {
    /// Returns the total time that a QP waits for acknowledgements: one time-out, plus one more
    /// time-out for each retransmission (InfiniBand specification 9.7.6.1.3, "local ACK timeout").
    /// A device may take up to four times as long. With adaptive retransmission, a ConnectX may
    /// take any time: its profile decides (docs/mlx5.md). `nccl-spark doctor --silence` measures
    /// the time.
    pub fn silence_limit(&self) -> Duration {
        let timeout_ns = 4096_u64 << self.timeout.min(31);
        Duration::from_nanos(timeout_ns * (u64::from(self.retry_count) + 1))
    }

    /// Returns warnings about settings that lose rails too late or too easily.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let silence = self.silence_limit();
        let timeout = self.timeout;
        let retries = self.retry_count;
        if retries < ENOUGH_RETRIES {
            warnings.push(format!(
                "NCCL_IB_RETRY_CNT={retries}: a few lost packets make a rail count as lost; set {ENOUGH_RETRIES} or more, or leave it unset"
            ));
        }
        if silence > PROMISED {
            warnings.push(format!(
                "NCCL_IB_TIMEOUT={timeout} and NCCL_IB_RETRY_CNT={retries}: a rail that falls silent counts as lost after {silence:.1?} \
                 or more; unset, they make that half a second by the InfiniBand specification"
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn warnings(variables: &[(&str, &str)]) -> Vec<String> {
        let variables: Vec<_> = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Config::from_variables(&variables).unwrap().qp.warnings()
    }

    #[test]
    fn the_defaults_keep_the_promise() {
        let config = Config::from_variables(&[]).unwrap();
        assert_eq!(config.qp.silence_limit(), Duration::from_nanos(469_762_048));
        assert!(warnings(&[]).is_empty());
    }

    #[test]
    fn settings_that_lose_rails_too_late_or_too_easily_are_warnings() {
        let late = warnings(&[("NCCL_IB_TIMEOUT", "22"), ("NCCL_IB_RETRY_CNT", "7")]);
        assert!(
            matches!(&late[..], [one] if one.contains("after 137.4s")),
            "{late:?}"
        );
        let few = warnings(&[("NCCL_IB_RETRY_CNT", "2")]);
        assert!(
            matches!(&few[..], [one] if one.contains("NCCL_IB_RETRY_CNT=2")),
            "{few:?}"
        );
        assert_eq!(
            warnings(&[("NCCL_IB_RETRY_CNT", "0"), ("NCCL_IB_TIMEOUT", "31")]).len(),
            2
        );
        assert!(warnings(&[("NCCL_IB_RETRY_CNT", "3"), ("NCCL_IB_TIMEOUT", "15")]).is_empty());
    }
}
