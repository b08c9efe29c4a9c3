//! Fields of /proc/self/status.

use anyhow::{Context, Result};
use std::fs;

const STATUS: &str = "/proc/self/status";

/// Returns the number in a field of this process; memory is in KiB.
pub fn field(name: &str) -> Result<u64> {
    let status = fs::read_to_string(STATUS).with_context(|| format!("read {STATUS}"))?;
    in_text(&status, name).with_context(|| format!("no {name} in {STATUS}"))
}

fn in_text(status: &str, name: &str) -> Option<u64> {
    let rest = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "Name:\tx\nRssAnonymous:\t9 kB\nRssAnon:\t  1234 kB\nThreads:\t7\n";
        let field = |name| in_text(status, name);
        assert_eq!(
            (field("RssAnon"), field("Threads"), field("RssShmem")),
            (Some(1234), Some(7), None)
        );
    }
}
