//! Fields of /proc/PID/stat and /proc/PID/status: proc_pid_stat(5), proc_pid_status(5).

/// Returns the fields of `stat` after the command (any text in parentheses): state, parent, process
/// group.
pub fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
}

/// Returns the memory that a process has pinned for devices, from its `status`. The kernel counts a
/// page once for each registration, and compares the sum with the limit of locked memory
/// (`ib_umem_get` in drivers/infiniband/core/umem.c).
pub fn pinned_bytes(status: &str) -> Option<u64> {
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix("VmPin:"))?;
    Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_command_name_may_contain_parentheses_and_spaces() {
        assert_eq!(
            super::fields("7 (a) b) S 42 9").collect::<Vec<_>>(),
            ["S", "42", "9"]
        );
        assert_eq!(super::fields("").next(), None);
    }

    #[test]
    fn pinned_memory_is_in_kib() {
        assert_eq!(
            super::pinned_bytes("Name:\tx\nVmPin:\t    2048 kB\nVmHWM:\t 1 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(super::pinned_bytes("Name:\tkthreadd\n"), None);
    }
}
