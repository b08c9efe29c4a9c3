//! What the rails have carried, said once at the end.

use std::fmt::Write;

/// Logs one line with each rail's payload bytes and shares of messages. Says nothing where nothing was carried.
pub fn end_of_job(rails: impl Iterator<Item = (String, (u64, u64))>) {
    if let Some(line) = line(rails) {
        tracing::info!("{line}");
    }
}

fn line(rails: impl Iterator<Item = (String, (u64, u64))>) -> Option<String> {
    let (mut line, mut total) = (String::new(), 0);
    for (name, (bytes, shares)) in rails {
        total += bytes;
        // Writing to a String cannot fail.
        let _ = write!(line, "; {name} {bytes} bytes in {shares} writes");
    }
    (total > 0).then(|| format!("sent {total} bytes of payload so far{line}"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_line_adds_up_and_is_silent_about_nothing() {
        let rails = [("a:1".to_owned(), (10, 2)), ("b:1".to_owned(), (5, 1))];
        let line = super::line(rails.into_iter()).unwrap();
        assert_eq!(line, "sent 15 bytes of payload so far; a:1 10 bytes in 2 writes; b:1 5 bytes in 1 writes");
        assert_eq!(super::line([("a:1".to_owned(), (0, 0))].into_iter()), None);
    }
}
