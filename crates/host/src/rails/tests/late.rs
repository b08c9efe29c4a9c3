//! Ports that become rails soon after the survey.

use crate::port::PortState;
use crate::rails::testbed::{TestHost, spark};

#[test]
fn the_twin_of_a_rail_is_late_if_it_has_a_carrier_and_no_address() {
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
        assert_eq!(late(&host, ""), [""; 0], "no interface has a carrier");
        host.set_carrier("enP2p1s0f0np0");
        assert_eq!(late(&host, ""), ["roceP2p1s0f0"], "{state:?}");
        assert_eq!(late(&host, "rocep1s0f0"), [""; 0], "the filter excludes it");
        assert_eq!(
            late(&host, "rocep1s0f1,roceP2p1s0f0"),
            [""; 0],
            "no rail uses its cable"
        );
    }
}
