//! Rates and lists as a person reads them.

/// Formats Mb/s as Gb/s.
pub fn gbps(mbps: u32) -> String {
    let tenths = (u64::from(mbps) + 50) / 100;
    if tenths % 10 == 0 {
        format!("{} Gb/s", tenths / 10)
    } else {
        format!("{}.{} Gb/s", tenths / 10, tenths % 10)
    }
}

/// Joins names with commas and "and".
pub fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    match names.as_slice() {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        _ => names.join(""),
    }
}
