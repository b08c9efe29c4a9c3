//! Addresses by their form: IPv6 and GIDs, IPv4, hardware addresses, GUIDs. What is no one's stays: loopback, zero, netmasks; and so do
//! times, PCI addresses and versions.

use super::edges::{ends_free, starts_free};
use super::identity::Known;
use super::pseudonyms::{Kind, Pseudonyms};
use regex::{Captures, Regex};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::sync::LazyLock;

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a constant pattern")
}

/// Everything that may be a part of an address in IPv6's or a GUID's form.
static COLONS: LazyLock<Regex> = LazyLock::new(|| pattern(r"[0-9a-fA-F:.]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*"));
/// EUI-48, EUI-64, and InfiniBand's hardware addresses of 20 bytes.
static MAC: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[0-9a-fA-F]{2}(?:(?::[0-9a-fA-F]{2}){5,19}|(?:-[0-9a-fA-F]{2}){5,19})"));
static DOTTED_MAC: LazyLock<Regex> = LazyLock::new(|| pattern(r"[0-9a-fA-F]{4}\.[0-9a-fA-F]{4}\.[0-9a-fA-F]{4}"));
/// An interface that is called by its hardware address.
static NAMED_BY_MAC: LazyLock<Regex> = LazyLock::new(|| pattern(r"(en|wl|ww|ib|sl)x([0-9a-fA-F]{12})"));
static HEX: LazyLock<Regex> = LazyLock::new(|| pattern(r"(0[xX])?([0-9a-fA-F]{12,})"));
static DOTS: LazyLock<Regex> = LazyLock::new(|| pattern(r"[0-9.]*[0-9]\.[0-9.]*[0-9]"));
/// What says that four numbers are a version.
static VERSION: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"(?:(?i:version)[ :="']{0,4}|\.so\.|(?:^|[^A-Za-z0-9])v)$"#));

/// Escapes of JSON, whose letters and digits belong to no number beside them.
static ESCAPE: LazyLock<Regex> = LazyLock::new(|| pattern(r#"\\(?:u[0-9a-fA-F]{4}|[nrtbf"\\/])"#));

/// All of them.
pub(super) fn all(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let mut result = String::with_capacity(text.len());
    let mut done = 0;
    for escape in ESCAPE.find_iter(text) {
        result.push_str(&between_escapes(&text[done..escape.start()], known, pseudonyms));
        result.push_str(escape.as_str());
        done = escape.end();
    }
    result.push_str(&between_escapes(&text[done..], known, pseudonyms));
    result
}

fn between_escapes(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let text = colons(text, pseudonyms);
    let text = MAC.replace_all(&text, |found: &Captures| mac(&found[0], pseudonyms));
    let text = DOTTED_MAC.replace_all(&text, |found: &Captures| mac(&found[0], pseudonyms));
    let text = NAMED_BY_MAC.replace_all(&text, |found: &Captures| {
        format!("{}x{}", &found[1], pseudonyms.of(Kind::Mac, &plain(&found[2])))
    });
    let text = HEX.replace_all(&text, |found: &Captures| hex(found, known, pseudonyms));
    dots(&text, known, pseudonyms)
}

fn plain(text: &str) -> String {
    text.chars().filter(char::is_ascii_hexdigit).map(|c| c.to_ascii_lowercase()).collect()
}

fn mac(text: &str, pseudonyms: &mut Pseudonyms) -> String {
    let digits = plain(text);
    if digits.bytes().all(|byte| byte == b'0') || digits.bytes().all(|byte| byte == b'f') {
        return text.to_owned();
    }
    match u64::from_str_radix(&digits, 16) {
        Ok(guid) if digits.len() == 16 => guid_name(guid, pseudonyms),
        _ => pseudonyms.of(Kind::Mac, &digits),
    }
}

fn guid_name(guid: u64, pseudonyms: &mut Pseudonyms) -> String {
    pseudonyms.of(Kind::Guid, &format!("{guid:016x}"))
}

/// Digits without separators: 32 are a GID or a token, 16 with 0x a GUID; 16 and 12 without it only if they are known to be one. Hashes
/// and build ids are longer or bare, and stay.
fn hex(found: &Captures, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let (whole, digits) = (&found[0], &found[2]);
    let start = found.get(1).map_or("", |start| start.as_str());
    let Some(value) = (digits.len() <= 32).then(|| u128::from_str_radix(digits, 16).ok()).flatten() else {
        return whole.to_owned();
    };
    if value == 0 || digits.bytes().all(|byte| byte.eq_ignore_ascii_case(&b'f')) {
        return whole.to_owned();
    }
    let bytes: [u8; 16] = value.to_be_bytes();
    match digits.len() {
        32 => {
            let address = IpAddr::from(Ipv6Addr::from(value)).to_canonical();
            let is_known = known.addresses.iter().any(|(one, _)| *one == address);
            let is_gid =
                is_known || digits.starts_with("fe80000000000000") || digits.starts_with("00000000000000000000");
            if is_gid { address_name(address, true, pseudonyms) } else { pseudonyms.of(Kind::Token, &plain(digits)) }
        }
        16 if !start.is_empty() || known.guids.contains(&(value as u64)) => guid_name(value as u64, pseudonyms),
        12 if known.macs.iter().any(|mac| bytes[10..] == mac[..]) => pseudonyms.of(Kind::Mac, &plain(digits)),
        _ => whole.to_owned(),
    }
}

/// `is_mapped`: an IPv4 address in an IPv6 address's form.
fn address_name(address: IpAddr, is_mapped: bool, pseudonyms: &mut Pseudonyms) -> String {
    let name = pseudonyms.of_address(address);
    if is_mapped && address.is_ipv4() { format!("mapped-{name}") } else { name }
}

fn colons(text: &str, pseudonyms: &mut Pseudonyms) -> String {
    let mut result = String::with_capacity(text.len());
    let mut done = 0;
    for found in COLONS.find_iter(text) {
        let run = Run::new(text, found.range());
        for (range, value) in run.addresses() {
            result.push_str(&text[done..range.start]);
            result.push_str(&match value {
                Colons::Address(address) => {
                    let canonical = IpAddr::from(address).to_canonical();
                    address_name(canonical, true, pseudonyms)
                }
                Colons::Guid(guid) => guid_name(guid, pseudonyms),
            });
            done = range.end;
        }
    }
    result.push_str(&text[done..]);
    result
}

/// What groups with colons can be.
enum Colons {
    Address(Ipv6Addr),
    Guid(u64),
}

/// Hexadecimal digits, dots and colons without anything between them.
struct Run<'t> {
    text: &'t str,
    /// Where each group is, between two colons.
    groups: Vec<Range<usize>>,
}

impl<'t> Run<'t> {
    fn new(text: &'t str, range: Range<usize>) -> Self {
        let whole = &text[range.clone()];
        let mut at = range.start;
        let mut groups: Vec<Range<usize>> = Vec::new();
        for group in whole.split(':') {
            groups.push(at..at + group.len());
            at += group.len() + 1;
        }
        // What belongs to a word is no group: as in `gid:fe80::1`, or `std::env`.
        if !starts_free(text, range.start) {
            groups.remove(0);
        }
        if !ends_free(text, range.end) {
            groups.pop();
        }
        // A sentence's or a label's colon or full stop.
        if let Some(last) = groups.last_mut() {
            last.end = last.start + text[last.clone()].trim_end_matches('.').len();
        }
        if let Some(first) = groups.first_mut() {
            first.start = first.end - text[first.clone()].trim_start_matches('.').len();
        }
        while groups.len() > 1 && groups[0].is_empty() && !groups[1].is_empty() {
            groups.remove(0);
        }
        let is_label = |groups: &[Range<usize>]| groups.len() > 1 && groups[groups.len() - 1].is_empty();
        while is_label(&groups) && !groups[groups.len() - 2].is_empty() {
            groups.pop();
        }
        Self { text, groups }
    }

    fn has(&self, groups: &[Range<usize>], digits: usize) -> bool {
        groups.iter().all(|group| {
            let text = &self.text[group.clone()];
            text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }

    fn addresses(&self) -> Vec<(Range<usize>, Colons)> {
        let count = self.groups.len();
        // Hardware addresses have a rule of their own.
        if count < 3 || (count >= 6 && self.has(&self.groups, 2)) {
            return Vec::new();
        }
        if count == 4 && self.has(&self.groups, 4) {
            let digits: String = self.groups.iter().map(|group| &self.text[group.clone()]).collect();
            let guid = u64::from_str_radix(&digits, 16).ok().filter(|guid| *guid != 0);
            return guid
                .map(|guid| (self.groups[0].start..self.groups[3].end, Colons::Guid(guid)))
                .into_iter()
                .collect();
        }
        let mut found = Vec::new();
        let mut from = 0;
        // Whole groups of four digits first: more than eight groups begin or end with something else.
        let exact = (0..count.saturating_sub(7)).find(|at| self.has(&self.groups[*at..at + 8], 4));
        if let Some(at) = exact.filter(|_| count > 8) {
            from = at;
        }
        while from < count {
            let most = (from + 10).min(count);
            match (from + 2..=most).rev().find_map(|to| self.address(from, to)) {
                Some((range, address, to)) => {
                    if !address.is_unspecified() && !address.is_loopback() && !is_mapped_local(address) {
                        found.push((range, Colons::Address(address)));
                    }
                    from = to;
                }
                None => from += 1,
            }
        }
        found
    }

    fn address(&self, from: usize, to: usize) -> Option<(Range<usize>, Ipv6Addr, usize)> {
        let range = self.groups[from].start..self.groups[to - 1].end;
        let address = self.text[range.clone()].parse().ok()?;
        Some((range, address, to))
    }
}

fn is_mapped_local(address: Ipv6Addr) -> bool {
    address.to_ipv4_mapped().is_some_and(stays)
}

fn dots(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let mut result = String::with_capacity(text.len());
    let mut done = 0;
    for found in DOTS.find_iter(text) {
        let mut parts = Vec::new();
        let mut at = found.start();
        for part in found.as_str().split('.') {
            parts.push((at..at + part.len(), part.parse::<u8>().ok().filter(|_| part.len() <= 3)));
            at += part.len() + 1;
        }
        let mut from = 0;
        while from + 4 <= parts.len() {
            let window = &parts[from..from + 4];
            let [Some(a), Some(b), Some(c), Some(d)] = [window[0].1, window[1].1, window[2].1, window[3].1] else {
                from += 1;
                continue;
            };
            let address = Ipv4Addr::new(a, b, c, d);
            let is_known = || known.addresses.iter().any(|(one, _)| *one == IpAddr::from(address));
            let is_private = address.is_private() || address.is_link_local();
            let before = &text[..window[0].0.start];
            let is_version = !is_private && VERSION.is_match(tail(before)) && !is_known();
            if !stays(address) && !is_version {
                result.push_str(&text[done..window[0].0.start]);
                result.push_str(&pseudonyms.of_address(address.into()));
                done = window[3].0.end;
            }
            from += 4;
        }
    }
    result.push_str(&text[done..]);
    result
}

/// The last bytes of a text, as far as a rule looks back.
fn tail(text: &str) -> &str {
    let mut from = text.len().saturating_sub(16);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// Loopback, "this network" and netmasks are no one's.
fn stays(address: Ipv4Addr) -> bool {
    let bits = u32::from(address);
    let is_mask = bits.leading_ones() >= 8 && bits.leading_ones() + bits.trailing_zeros() == 32;
    address.is_loopback() || address.octets()[0] == 0 || is_mask || address.is_broadcast()
}
