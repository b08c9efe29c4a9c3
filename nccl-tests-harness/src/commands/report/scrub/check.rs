//! The last look at what is to be written: no rule of the scrubber is used here, the known things are simply searched for.

use super::edges::{ends_free, starts_free};
use super::identity::{Keep, Known, ORDINARY};
use std::net::{IpAddr, Ipv6Addr};

/// The kinds of known things that are in a text.
pub(super) fn survivors(text: &str, known: &Known, keep: Keep) -> Vec<&'static str> {
    let lower = text.to_ascii_lowercase();
    let squeezed: String = lower.chars().filter(|c| !matches!(c, ':' | '-' | '.')).collect();
    let mut found = Vec::new();
    let mut look = |kind: &'static str, is_there: bool| found.extend(is_there.then_some(kind));
    let lines = [one_line(text), one_line(&without_escapes(text))];
    let is_in_lines = |secret: &String| {
        let secret = one_line(secret);
        let quoted = secret.replace('\\', r"\\").replace('"', "\\\"");
        !secret.is_empty() && lines.iter().any(|line| line.contains(&secret) || line.contains(&quoted))
    };
    look("a token", known.secrets.iter().any(is_in_lines));
    if !keep.names {
        let is_word = |name: &String| !ORDINARY.contains(&name.as_str()) && has_word(text, &lower, name);
        look("a host name", known.hosts.iter().any(is_word));
        look("a user name", known.users.iter().any(is_word));
    }
    if !keep.serials {
        look(
            "a serial number",
            known.serials.iter().any(|serial| has_word(text, &lower, &serial.to_ascii_lowercase())),
        );
    }
    if !keep.addresses {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        look("a hardware address", known.macs.iter().any(|mac| squeezed.contains(&hex(mac))));
        let guid = |guid: &&u64| **guid != 0;
        look("a GUID", known.guids.iter().filter(guid).any(|guid| squeezed.contains(&format!("{guid:016x}"))));
        look(
            "an IP address or GID",
            known.addresses.iter().any(|(address, _)| has_address(&lower, &squeezed, *address)),
        );
    }
    found
}

/// With one blank in place of each run of them: a secret may be folded.
fn one_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control());
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// With a blank in place of JSON's line breaks and tabs.
fn without_escapes(text: &str) -> String {
    [r"\n", r"\r", r"\t"].iter().fold(text.to_owned(), |text, escape| text.replace(escape, " "))
}

/// `lower` is the text in small letters.
fn has_word(text: &str, lower: &str, word: &str) -> bool {
    lower.match_indices(word).any(|(at, _)| starts_free(text, at) && ends_free(text, at + word.len()))
}

fn has_address(text: &str, squeezed: &str, address: IpAddr) -> bool {
    let as_v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let digits: String = as_v6.octets().iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = as_v6.segments().map(|group| format!("{group:x}")).join(":");
    let is_in = |form: &str| {
        text.match_indices(form).any(|(at, _)| {
            let neighbours = [text[..at].bytes().last(), text.as_bytes().get(at + form.len()).copied()];
            neighbours.iter().flatten().all(|byte| !byte.is_ascii_hexdigit())
        })
    };
    let dotted = matches!(address, IpAddr::V4(_)) && is_in(&address.to_string());
    dotted || squeezed.contains(&digits) || is_in(&groups) || is_in(&written(as_v6))
}

/// As it is usually written, but IPv4-mapped ones in hexadecimal.
fn written(address: Ipv6Addr) -> String {
    match address.to_ipv4_mapped() {
        Some(v4) => {
            let [a, b, c, d] = v4.octets();
            format!("::ffff:{:x}:{:x}", u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
        }
        None => address.to_string(),
    }
}
