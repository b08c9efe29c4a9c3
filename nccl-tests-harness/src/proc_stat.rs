//! The fields of /proc/PID/stat: proc_pid_stat(5).

/// Returns the fields after the command (any text in parentheses): state, parent, process group.
pub fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit(')').next().unwrap_or_default().split_whitespace()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_command_name_may_contain_parentheses_and_spaces() {
        assert_eq!(super::fields("7 (a) b) S 42 9").collect::<Vec<_>>(), ["S", "42", "9"]);
        assert_eq!(super::fields("").next(), None);
    }
}
