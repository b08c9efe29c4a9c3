//! Ports that may become rails after the survey.

use crate::port::PortState;
use crate::rails::testbed::{TestHost, spark};

#[test]
fn the_twin_of_a_rail_is_late_if_its_link_is_there_or_coming_up() {
    let functions = |state: PortState| {
        let mut functions = spark(&[0, 1]);
        for function in functions
            .iter_mut()
            .filter(|function| function.device.starts_with("roceP2"))
        {
            (function.state, function.v4, function.gid_has_link_local) = (state, None, false);
        }
        functions
    };
    let late = |host: &TestHost, filter: &str| -> Vec<String> {
        let refused = host
            .survey(filter)
            .refused
            .into_iter()
            .filter(|port| port.is_late);
        refused.map(|port| port.device).collect()
    };
    for state in [PortState::Active, PortState::Init, PortState::Down] {
        let host = TestHost::new(&functions(state));
        if state != PortState::Init {
            assert_eq!(late(&host, ""), [""; 0], "no interface has a carrier");
        }
        host.set_carrier("enP2p1s0f0np0");
        let expected: &[&str] = match state {
            PortState::Init => &["roceP2p1s0f0", "roceP2p1s0f1"],
            _ => &["roceP2p1s0f0"],
        };
        assert_eq!(late(&host, ""), expected, "{state:?}");
        assert_eq!(late(&host, "rocep1s0f0"), [""; 0], "the filter excludes it");
        assert_eq!(
            late(&host, "rocep1s0f1,roceP2p1s0f0"),
            [""; 0],
            "no rail uses its cable"
        );
    }
}

#[test]
fn ports_without_a_link_or_an_address_are_kept_for_later_and_count_nothing() {
    let mut functions = spark(&[0, 1]);
    let whole = TestHost::new(&functions).survey("");
    assert!(whole.late.is_empty());
    // The second cable is not plugged in, and the first one's second function has no address.
    for function in &mut functions {
        if function.device.ends_with("f1") {
            (function.state, function.speed_mbps) = (PortState::Down, 10_000);
        } else if function.device.starts_with("roceP2") {
            (function.v4, function.gid_has_link_local) = (None, false);
        }
    }
    let survey = TestHost::new(&functions).survey("");
    let names = |rails: &[crate::rails::Rail]| -> Vec<String> {
        rails.iter().map(|rail| rail.device.clone()).collect()
    };
    assert_eq!(names(&survey.rails), ["rocep1s0f0"]);
    assert_eq!(
        names(&survey.late),
        ["roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"]
    );
    let [twin, second, _] = &survey.late[..] else {
        panic!("{:?}", survey.late);
    };
    let rail = &survey.rails[0];
    assert!(twin.cable == rail.cable && twin.link != rail.link);
    assert!(second.cable != rail.cable && second.link == rail.link);
    let mut speeds = survey.late.iter().map(|rail| rail.speed_mbps);
    assert!(
        speeds.all(|mbps| mbps == rail.speed_mbps),
        "a port that is down reports a wrong speed"
    );
    // The PCIe link of the one rail, which it has for itself.
    assert_eq!(survey.speed_mbps, 112_027);
    assert_eq!(survey.share_of_link_mbps(rail), 112_027);
    for late in &survey.late {
        assert!(late.addresses.len() == 1 && late.addresses[0].gid.starts_with(&[0xfe, 0x80]));
    }
    let excluded = TestHost::new(&functions).survey("rocep1s0f0");
    assert!(excluded.late.is_empty(), "{:?}", excluded.late);
    functions[1].physical = Some("0002:01:00.7");
    let virtual_too = TestHost::new(&functions).survey("");
    assert_eq!(virtual_too.late.len(), 2, "virtual functions never come");
}
