//! Finds the start of NCCL's log in a line of output that begins with other text.

use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub struct LogText {
    /// Names of hosts, found in lines that have only NCCL's log. They show where the host's name
    /// begins in a line with other text: in `-1vm:12:12 [0]` the name is `vm`, because the host
    /// `vm` is known, and `-1` belongs to the table.
    hosts: BTreeSet<String>,
}

/// A line of NCCL's log has one of these texts after host, process, thread and device (debug.cc).
/// ATTN came with NCCL 2.32.
const LEVELS: [&str; 5] = [
    " NCCL INFO",
    " NCCL WARN",
    " NCCL ATTN",
    " NCCL TRACE",
    " NCCL CALL",
];

impl LogText {
    /// Splits a line into the text before NCCL's log, and the log, if there is any.
    pub fn split<'a>(&mut self, line: &'a str) -> (&'a str, Option<&'a str>) {
        let Some(level) = LEVELS.iter().filter_map(|level| line.find(level)).min() else {
            return (line, None);
        };
        let Some((word_start, host)) = origin(&line[..level]) else {
            return (line, None);
        };
        if before_time(&line[..word_start]) == 0 {
            self.hosts.insert(host.to_owned());
            return ("", Some(line));
        }
        let (own, log) = line.split_at(before_time(
            &line[..word_start + host.len() - self.name_bytes(host)],
        ));
        (own, Some(log))
    }

    /// Returns the length of the host's name at the end of `text`. Other output may precede the
    /// name.
    fn name_bytes(&self, text: &str) -> usize {
        let known = self
            .hosts
            .iter()
            .filter(|host| text.ends_with(host.as_str()))
            .map(String::len)
            .max();
        known.unwrap_or_else(|| text.len() - value_bytes(text))
    }
}

/// Finds the first word of `text` that ends in `:PID:TID`, the origin of a log line. Returns the
/// word's position and the host in it.
fn origin(text: &str) -> Option<(usize, &str)> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut at = 0;
    for word in text.split(' ') {
        let parts = word
            .rsplit_once(':')
            .and_then(|(rest, tid)| Some((rest.rsplit_once(':')?, tid)));
        if let Some(((host, pid), tid)) = parts
            && !host.is_empty()
            && is_number(pid)
            && is_number(tid)
        {
            return Some((at, host));
        }
        at += word.len() + 1;
    }
    None
}

/// Returns the length of the longest number, or of `N/A`, that `text` begins with, or 0 if there is
/// none. At least one character must follow it, because a host's name is not empty.
fn value_bytes(text: &str) -> usize {
    let is_value = |text: &str| {
        text == "N/A" || (!text.starts_with(['i', 'n', 'I', 'N']) && text.parse::<f64>().is_ok())
    };
    text.char_indices()
        .map(|(at, _)| at)
        .rev()
        .find(|end| is_value(&text[..*end]))
        .unwrap_or(0)
}

/// Returns the length of `text` without the time in brackets at its end. NCCL writes this time
/// before the origin of a WARN, and of other lines if `NCCL_DEBUG_TIMESTAMP_LEVELS` requests it.
fn before_time(text: &str) -> usize {
    let is_time = |text: &str| {
        text.contains(':') && text.bytes().all(|byte| b"0123456789-:. T".contains(&byte))
    };
    match text
        .trim_end()
        .strip_suffix(']')
        .and_then(|rest| rest.rsplit_once('['))
    {
        Some((before, time)) if is_time(time) => before.len(),
        _ => text.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(lines: &[&str]) -> (String, Option<String>) {
        let mut log = LogText::default();
        let mut last = (String::new(), None);
        for line in lines {
            let (own, log) = log.split(line);
            last = (own.to_owned(), log.map(str::to_owned));
        }
        last
    }

    #[test]
    fn a_line_of_the_log_alone_has_nothing_before_it() {
        for line in [
            "vm:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0",
            "[2026-11-21 03:45:10] vm:12:34 [0] net.cc:120 NCCL WARN NET/Spark : rail lost",
            "[2026-11-29 08:53:35] vm:12:34 [0] outages.rs:3 NCCL ATTN NET/Spark: rail lost",
            "vm:12:34 NCCL CALL ncclAllReduce",
            "vm:12:34 [0] 12.500000 init:3 NCCL TRACE hello",
        ] {
            assert_eq!(split(&[line]), (String::new(), Some(line.to_owned())));
        }
        assert_eq!(
            split(&["  8  2  float"]),
            ("  8  2  float".to_owned(), None)
        );
        assert_eq!(
            split(&["# talks of NCCL INFO"]),
            ("# talks of NCCL INFO".to_owned(), None)
        );
    }

    #[test]
    fn a_known_host_is_found_inside_longer_words() {
        for (own, host) in [
            ("  8  2  float  sum  -1", "vm"),
            ("  0.10  N/A", "Avm"),
            ("  0.10  0", "1node.a"),
        ] {
            let known = format!("{host}:1:1 [0] NCCL INFO hello");
            let log = format!("{host}:12:34 [0] NCCL INFO hello");
            assert_eq!(
                split(&[&known, &format!("{own}{log}")]),
                (own.to_owned(), Some(log))
            );
            let log = format!("[2026-11-21 03:45:10] {host}:12:34 [0] NCCL INFO hello");
            assert_eq!(
                split(&[&known, &format!("{own}{log}")]),
                (own.to_owned(), Some(log))
            );
        }
    }

    #[test]
    fn an_unknown_host_begins_behind_the_number() {
        for own in ["  8  2  float  sum  -1", "  0.10  0.20  N/A", "  8  1e+03"] {
            let (before, log) = split(&[&format!("{own}vm:1:2 [0] NCCL INFO hello")]);
            assert_eq!(
                (before.as_str(), log.as_deref()),
                (own, Some("vm:1:2 [0] NCCL INFO hello"))
            );
        }
    }
}
