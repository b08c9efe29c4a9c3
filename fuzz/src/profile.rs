//! The text of a software fabric's profile, as a user writes it.

use crate::target::Seeds;
use softverbs::profile::{MAX_NODES, MAX_RAILS, MAX_SHARED, Profile};
use softverbs::wiring::MAX_WIRES;

/// Checks any text; bytes that are not UTF-8 are replaced.
pub fn check(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let profile = match Profile::parse("fuzz", &text) {
        Ok(profile) => profile,
        Err(why) => {
            // The error quotes one word and its line, escaped.
            assert!(
                why.starts_with("fuzz") && why.len() < 16 * text.len() + 256,
                "{why}"
            );
            return false;
        }
    };
    assert!((1..=MAX_RAILS).contains(&profile.rails.len()));
    assert!(profile.links.len() + profile.cables.len() <= MAX_SHARED);
    for rail in &profile.rails {
        assert!(
            rail.link < profile.links.len() && rail.cable < profile.cables.len(),
            "{rail:?}"
        );
    }
    for wire in profile.wires.iter() {
        assert!(
            wire.ends
                .iter()
                .all(|end| end.node < MAX_NODES && end.cable < profile.cables.len()),
            "{wire:?}"
        );
        assert!(
            wire.ends[0].node != wire.ends[1].node
                && profile.wires.join(wire.ends[0], wire.ends[1]),
            "{wire:?}"
        );
    }
    assert!(
        profile.wires.iter().count() <= MAX_WIRES
            && profile.wires.nodes().is_none_or(|nodes| nodes <= MAX_NODES)
    );
    let forbidden = profile.forbidden.iter();
    assert!(
        forbidden
            .clone()
            .all(|at| at.node < MAX_NODES && at.rail < profile.rails.len()),
        "{profile:?}"
    );
    let mut gids: Vec<[u8; 16]> = Vec::new();
    for node in 0..MAX_NODES {
        (0..profile.rails.len()).for_each(|rail| gids.extend(profile.gids(node, rail)));
    }
    let all = gids.len();
    gids.sort_unstable();
    gids.dedup();
    assert_eq!(
        gids.len(),
        all,
        "an address that two rails have: {profile:?}"
    );
    let rates = profile
        .rails
        .iter()
        .flat_map(|rail| [rail.line_mbps, rail.speed_mbps, rail.qp_mbps]);
    let shared = profile
        .links
        .iter()
        .flat_map(|link| [link.gts, link.payload_mbps]);
    let cables = profile.cables.iter().map(|cable| cable.payload_mbps);
    assert!(
        rates
            .chain(shared)
            .chain(cables)
            .all(|rate| rate.is_finite() && rate >= 0.0),
        "{profile:?}"
    );
    // Written and read again, the profile is the same, whatever its spelling and order of lines.
    let written = profile.to_text();
    assert_eq!(
        Profile::parse("fuzz", &written).as_ref(),
        Ok(&profile),
        "{written}"
    );
    let resources = profile.links.len() + profile.cables.len() + profile.rails.len();
    let wiring =
        profile.wires.iter().count() + profile.wires.forwards().count() + forbidden.count();
    assert_eq!(written.lines().count(), resources + wiring);
    true
}

/// Four built-in profiles, a profile in an unusual spelling, and the same profile with wires and
/// with devices that nodes forbid.
pub fn seeds() -> Seeds {
    let built_in = |name: &str| {
        Profile::load(name, 1.0)
            .expect("a built-in profile")
            .to_text()
            .into_bytes()
    };
    let spelt = "# two of a kind\nlink A pci=0000:01:00 gts=1.6e1 width=4 payload=+112000 # x4\ncable c payload=0\n\n\
        rail r0 netdev=e0 port=p0 link=A cable=c function=0 line=0 qp=.5 latency=1400 speed=200000\n\
        rail r1 netdev=e1 port=p=1 link=A cable=c function=1 line=00200000 qp=0 latency=0";
    let wired = format!(
        "{spelt}\nwire w ends=0.c,1.c subnets=one\nwire v ends=2.c,15.c # another\nnode 1 forbids=r0,r1\nnode 02 forbids=r1"
    );
    vec![
        ("wired", wired.into_bytes()),
        ("triangle", built_in("spark-triangle")),
        ("one-cable", built_in("spark-1cable")),
        ("two-cables", built_in("spark-2cable")),
        ("unpaced", built_in("unpaced")),
        ("spelt-otherwise", spelt.as_bytes().to_vec()),
    ]
}
