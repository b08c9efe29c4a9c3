//! Which pseudonym stands for what. They are numbered as they are first needed.

use super::edges::{ends_free, starts_free};
use super::identity::Known;
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

/// What a pseudonym stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Host,
    User,
    Email,
    Mac,
    Guid,
    Serial,
    Token,
}

/// Pseudonyms by what they stand for.
#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    by_key: BTreeMap<(Kind, String), String>,
    by_address: BTreeMap<IpAddr, String>,
    counts: BTreeMap<String, usize>,
    /// Base address and length of the prefix.
    subnets: BTreeSet<(u8, IpAddr)>,
    net_names: BTreeMap<(u8, IpAddr), String>,
    /// Names that no pseudonym may have in it.
    names: BTreeSet<String>,
}

static PSEUDONYM: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^(?:host|domain|user|email|mac|guid|serial|token)-[0-9]+$").expect("a constant pattern")
});
static WITH_PREFIX: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"([0-9a-fA-F:.]*[.:][0-9a-fA-F:.]+)/([0-9]{1,3})").expect("a constant pattern"));

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::User => "user",
            Self::Email => "email",
            Self::Mac => "mac",
            Self::Guid => "guid",
            Self::Serial => "serial",
            Self::Token => "token",
        }
    }

    /// Whether a word is what this module makes.
    pub(super) fn is_pseudonym(word: &str) -> bool {
        PSEUDONYM.is_match(word)
    }
}

impl Pseudonyms {
    pub(super) fn new(known: &Known) -> Self {
        let mut all = Self::default();
        all.avoid(known);
        all
    }

    /// No pseudonym is to have one of these names in it: a host may be called `host-2`.
    pub(super) fn avoid(&mut self, known: &Known) {
        self.names.extend(known.hosts.iter().chain(&known.users).cloned());
    }

    /// The one for `key`.
    pub(super) fn of(&mut self, kind: Kind, key: &str) -> String {
        let key = (kind, key.to_owned());
        if let Some(found) = self.by_key.get(&key) {
            return found.clone();
        }
        let new = self.next(&format!("{}-", kind.word()));
        self.by_key.insert(key, new.clone());
        new
    }

    /// The one for an address: in a known subnet it names that, and its own number there.
    pub(super) fn of_address(&mut self, address: IpAddr) -> String {
        let address = address.to_canonical();
        if let Some(found) = self.by_address.get(&address) {
            return found.clone();
        }
        let family = if address.is_ipv4() { "ip4" } else { "ip6" };
        let is_link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let of = |(bits, base): &&(u8, IpAddr)| masked(address, *bits) == Some(*base);
        let subnet = self.subnets.iter().rev().find(of).copied().filter(|_| !is_link_local);
        let new = match subnet {
            _ if is_link_local => self.next("ip6-link."),
            None => self.next(&format!("{family}-")),
            Some(subnet) => {
                let net = match self.net_names.get(&subnet) {
                    Some(net) => net.clone(),
                    None => self.next(&format!("{family}-net")),
                };
                self.net_names.insert(subnet, net.clone());
                if subnet.1 == address { format!("{net}.0") } else { self.next(&format!("{net}.")) }
            }
        };
        self.by_address.insert(address, new.clone());
        new
    }

    /// Takes the subnets from the machine's interfaces, and from addresses with a prefix length in the text.
    pub(super) fn learn_subnets(&mut self, known: &Known, text: &str) {
        let of_interfaces = known.addresses.iter().filter_map(|(address, bits)| Some((*address, (*bits)?)));
        let in_text = WITH_PREFIX.captures_iter(text).filter_map(|found| {
            let address = found[1].trim_start_matches(['.']).parse::<IpAddr>().ok()?;
            Some((address, found[2].parse::<u8>().ok()?))
        });
        for (address, bits) in of_interfaces.chain(in_text) {
            let whole = if address.is_ipv4() { 8..=31 } else { 16..=127 };
            if let Some(base) = masked(address, bits).filter(|_| whole.contains(&bits)) {
                self.subnets.insert((bits, base));
            }
        }
    }

    fn next(&mut self, start: &str) -> String {
        loop {
            let count = self.counts.entry(start.to_owned()).or_default();
            *count += 1;
            let new = format!("{start}{count}");
            let has_name = |name: &String| {
                new.match_indices(name.as_str())
                    .any(|(at, _)| starts_free(&new, at) && ends_free(&new, at + name.len()))
            };
            // A name that is the beginning alone would be in all of them; such names are ordinary words.
            if !self.names.iter().any(has_name) || *count > self.names.len() + 1_000_000 {
                return new;
            }
        }
    }
}

/// The address with all but its first bits zero.
fn masked(address: IpAddr, bits: u8) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            Some(Ipv4Addr::from(u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            Some(Ipv6Addr::from(u128::from(v6) & mask).into())
        }
        _ => None,
    }
}
