//! Texts that a report may have, and texts that it must not have.

use super::names::{Name, Value};
use proptest::prelude::*;

fn is_reported(text: &str) -> bool {
    Name::new(text) != Name::new("?")
}

#[test]
fn names_of_devices_versions_and_findings_are_reported() {
    let names = "rocep1s0f0 roceP2p1s0f1:1 mlx5_0 6.17.0-1014-nvidia 28.45.4028 580.95.05 2.28.9+cuda13.0 5.36_0ACUM018 \
        07/29/2025 NVD0000000087 slow-rail NCCL_SPARK_TUNER ring/ll128/16 libibverbs.so.1.14.50.0 out_of_sequence";
    for text in names.split_whitespace() {
        assert!(is_reported(text), "{text}");
    }
}

#[test]
fn text_that_could_identify_the_owner_is_left_out() {
    let texts = "gx10-a1b2 margarete 10.77.3.9 192.168.177.11 fe80::1 2001:db8::1 4c:bb:47:2d:19:e3 4cbb472d19e3 \
        rocex4cbb472d19e3 enx4cbb472d19e3 1654324000718 /home/me mlx5_acme mlx5_0:acme fc4cea0300f94230 1:2 10:11 \
        0b1c2d3e4f5061728394a5b6c7d8e9f0 3c9e2f10-aaaa-bbbb-cccc-1234567890ab rosalind@example.com \
        c0db9360000000000000000000000000000000ff";
    for text in texts.split_whitespace().chain([""]) {
        assert!(!is_reported(text), "{text}");
    }
}

#[test]
fn a_version_ends_before_other_words_and_is_no_address() {
    for (text, expected) in [
        ("6.17.0-1014-nvidia", "6.17.0-1014-nvidia"),
        ("6.17.0-1014-nvidia-acme", "6.17.0-1014-nvidia"),
        ("6.8.0-acme-lab", "6.8.0"),
        ("10.77.3.9-1", "other"),
        ("12-34-56-78-9a-bc", "other"),
        ("acme 1.2.3", "other"),
    ] {
        assert_eq!(Name::version(text), Name::new(expected), "{text}");
    }
    assert_eq!(
        Name::product("NVIDIA NVIDIA_DGX_Spark of acme"),
        ["NVIDIA", "NVIDIA", "DGX", "Spark"]
    );
}

#[test]
fn values_are_reported_only_of_numeric_variables() {
    let reported = |name, text| serde_json::to_string(&Value::new(name, text)).unwrap();
    assert_eq!(reported("NCCL_IB_TIMEOUT", "22"), "22");
    assert_eq!(reported("NCCL_IB_TIMEOUT", "x"), "\"other\"");
    assert_eq!(reported("NCCL_HOSTID", "1654324000718"), "\"other\"");
    assert_eq!(reported("NCCL_SPARK_TUNER", "off"), "\"off\"");
    assert_eq!(reported("NCCL_NET", ""), "null");
}

proptest! {
    #[test]
    fn a_missing_address_is_reported(four in any::<[u8; 4]>(), six in any::<[u8; 6]>(), sixteen in any::<[u8; 16]>()) {
        let mac = |between: &str| six.map(|byte| format!("{byte:02x}")).join(between);
        let [v4, v6] = [std::net::Ipv4Addr::from(four).to_string(), std::net::Ipv6Addr::from(sixteen).to_string()];
        for text in [v4.clone(), format!("{v4}-1"), format!("{v4}:1"), v6, mac(":"), mac("-"), mac("")] {
            prop_assert!(!is_reported(&text), "{}", text);
            prop_assert_eq!(Name::version(&text), Name::new("?"));
        }
    }
}
