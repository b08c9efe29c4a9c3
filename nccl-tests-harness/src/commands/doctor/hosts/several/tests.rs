//! Parsing of `rails` output, and the printed page.

use super::*;

fn printed(device: &str, address: &str) -> String {
    format!(
        "Welcome to DGX OS\n{{\n  \"expected_mbps\": 1, \"rails\": [{{\"device\": \"{device}\", \"port\": 1, \"netdev\": null, \
         \"physical_port\": \"p0\", \"pci\": null, \"pcie_link\": 0, \"cable\": 0, \"twin\": null, \"speed_mbps\": 200000, \
         \"path_mtu_bytes\": 4096, \"netdev_mtu_bytes\": 9000, \"addresses\": [{{\"address\": \"{address}\", \"prefix\": 24, \
         \"gid_index\": 3}}]}}], \"unused\": [], \"pcie_links\": [{{\"slot\": null, \"rate\": null, \"payload_mbps\": 112027, \
         \"devices\": []}}], \"warnings\": [], \"ok\": true, \"error\": null}}\n"
    )
}

#[test]
fn the_output_of_rails_on_a_host_is_read() {
    let rails = parse(&printed("rocep1s0f0", "192.168.100.1")).unwrap();
    assert_eq!(
        (rails[0].name.as_str(), rails[0].link_mbps),
        ("rocep1s0f0:1", 112_027)
    );
    assert_eq!(
        rails[0].addresses,
        [("::ffff:192.168.100.1".parse().unwrap(), Some(24))]
    );
    let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
    assert!(error("command not found").contains("no JSON"));
    assert!(error("{\n\"rails\": 7}").contains("does not have the fields of this version"));
    let failed = "{\n\"rails\": [], \"pcie_links\": [], \"ok\": false, \"error\": \"libibverbs.so.1 is missing\"}";
    assert!(error(failed).contains("libibverbs.so.1 is missing"));
    assert!(error(&failed.replace("is missing", "\\u001b[2J")).contains("libibverbs.so.1 ?[2J"));
}

#[test]
fn the_page_shows_the_order_and_unreachable_hosts() {
    let hosts = [
        printed("mlx5_0", "192.168.1.1"),
        printed("mlx5_0", "192.168.2.2"),
        printed("mlx5_0", "192.168.1.3"),
    ];
    let names = ["a", "b", "c"].map(str::to_owned);
    let rails: Vec<_> = hosts.iter().map(|text| parse(text).unwrap()).collect();
    let pair_counts = PairCounts::of(&rails.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let page = text(&HostsReport::of(&names, &rails, &pair_counts));
    assert!(
        page.contains("No order of ranks") && page.contains("(2 pairs): a and b; b and c"),
        "{page}"
    );
    let two = [0, 2].map(|at: usize| rails[at].clone());
    let pair_counts = PairCounts::of(&two.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let page = text(&HostsReport::of(
        &[names[0].clone(), names[2].clone()],
        &two,
        &pair_counts,
    ));
    assert!(
        page.contains("Ranks in this order: a,c\n  a -- c -- a\n"),
        "{page}"
    );
}
