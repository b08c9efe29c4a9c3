//! What the kernel says of a process in one line: proc_pid_stat(5).

/// The fields after the command, which stands in parentheses and may hold anything: the state first, the parent second, the process group third.
pub fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit(')').next().unwrap_or_default().split_whitespace()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_command_may_hold_parentheses_and_spaces() {
        assert_eq!(super::fields("7 (a) b) S 42 9").collect::<Vec<_>>(), ["S", "42", "9"]);
        assert_eq!(super::fields("").next(), None);
    }
}
