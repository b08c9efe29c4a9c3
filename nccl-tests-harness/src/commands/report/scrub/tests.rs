//! Each kind of thing in several notations, what must stay, and random things in random surroundings.

use super::{Keep, Known, Scrubber};
use proptest::prelude::*;
use std::net::Ipv6Addr;

const MAC: [u8; 6] = [0x4c, 0xbb, 0x47, 0x2d, 0x19, 0xe3];

fn known() -> Known {
    let mut known = Known::default();
    known.add_host("gx10-a1b2.lab.example.org");
    known.add_host("atlas");
    known.add_user("margarete");
    known.add_mac(MAC);
    known.add_address("192.168.177.11".parse().unwrap(), Some(24));
    known.add_address("2001:db8:7::11".parse().unwrap(), Some(64));
    known.guids.insert(0xfc4c_ea03_00f9_4230);
    known.add_serial("1654324000718");
    known.add_variable("HF_TOKEN", "a-token-of-an-unknown-form");
    known
}

fn scrubber() -> Scrubber {
    Scrubber::new(known(), Keep::default())
}

fn scrub(text: &str) -> String {
    scrubber().scrub(text)
}

#[test]
fn hosts_and_users_are_left_out_wherever_they_are_named() {
    for (text, expected) in [
        ("on gx10-a1b2: x", "on host-1: x"),
        ("GX10-A1B2.lab.example.org:22", "host-2.host-1:22"),
        (r#""text\natlas, gx10-a1b2_eth""#, r#""text\nhost-2, host-1_eth""#),
        ("atlas2 and atlases", "atlas2 and atlases"),
        ("/home/margarete/x and /home/walter/y", "/home/user-1/x and /home/user-2/y"),
        ("Margarete's", "user-1's"),
        ("/home/nvidia/x nvidia", "/home/user-1/x nvidia"),
        (r"\NL:a@l[", r"\NL:user-1@host-1["),
        ("walter@box: walter", "user-1@host-1: user-1"),
        (r"a\nwalter@box", r"a\nuser-1@host-1"),
        ("thor-7:123:456 [0] NCCL INFO x\nthor-7", "host-1:123:456 [0] NCCL INFO x\nhost-1"),
        ("#  Rank  0 Group  0 Pid 7 on  thor-7 device  0", "#  Rank  0 Group  0 Pid 7 on  host-1 device  0"),
        (r#"{"host": "thor-7.lan"} THOR-7"#, r#"{"host": "host-2.host-1"} HOST"#),
        ("write me: a.b+c@example.com, or a.b+c@EXAMPLE.com", "write me: email-1, or email-1"),
    ] {
        let said = scrub(text);
        if expected.ends_with("HOST") {
            // Which of two new names comes first is not said.
            assert!(!said.to_ascii_lowercase().contains("thor-7") && !said.contains("lan"), "{said}");
        } else {
            assert_eq!(said, expected, "{text}");
        }
    }
}

#[test]
fn addresses_keep_their_subnets_and_prefixes() {
    let text =
        "192.168.177.11/24 192.168.177.12 ::ffff:192.168.177.11 0000:0000:0000:0000:0000:ffff:c0a8:b10b 10.1.2.3";
    let expected = "ip4-net1.1/24 ip4-net1.2 mapped-ip4-net1.1 mapped-ip4-net1.1 ip4-1";
    let mut scrubber = scrubber();
    // IPv6's form is looked for first, so the mapped address is numbered first.
    assert_eq!(scrubber.scrub("192.168.177.11"), "ip4-net1.1");
    assert_eq!(scrubber.scrub(text), expected);
    let text = "2001:db8:7::11/64 2001:0DB8:0007:0000:0000:0000:0000:0012 fe80::4ebb:47ff:fe2d:19e3%enp1s0f0np0/64 \
                fe80:0000:0000:0000:4ebb:47ff:fe2d:19e3 [2001:db8:9::1]:29501 10.9.0.0/16 10.9.8.7 fe80000000000000\
                4ebb47fffe2d19e3";
    let expected = "ip6-net1.1/64 ip6-net1.2 ip6-link.1%enp1s0f0np0/64 ip6-link.1 [ip6-1]:29501 ip4-net2.0/16 ip4-net2.1 \
                    ip6-link.1";
    assert_eq!(scrubber.scrub(text), expected);
}

#[test]
fn hardware_addresses_and_guids_are_left_out_in_every_notation() {
    for text in [
        "4c:bb:47:2d:19:e3 4C-BB-47-2D-19-E3 4cbb.472d.19e3 4CBB472D19E3",
        "enx4cbb472d19e3 enx4cbb472d19e3 wlx4cbb472d19e3 4c:bb:47:2d:19:e3",
    ] {
        let said = scrub(text);
        assert_eq!(said.matches("mac-1").count(), 4, "{said}");
    }
    let said =
        scrub("fc4c:ea03:00f9:4230 0xfc4cea0300f94230 fc4cea0300f94230 fc:4c:ea:03:00:f9:42:30 fc4c:ea03:00f9:4231");
    assert_eq!(said, "guid-1 guid-1 guid-1 guid-1 guid-2");
    assert_eq!(scrub("gid:fe80:0000:0000:0000:4ebb:47ff:fe2d:19e3."), "gid:ip6-link.1.");
    assert_eq!(scrub("peer:fe80::1: lost"), "peer:ip6-link.1: lost");
    let infiniband = "80:00:02:08:fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:aa:bb:cc";
    assert_eq!(scrub(infiniband), "mac-1");
}

#[test]
fn serial_numbers_and_tokens_are_left_out() {
    for (text, expected) in [
        ("GPU-3c9e2f10-aaaa-bbbb-cccc-1234567890ab", "GPU-serial-1"),
        ("Serial Number: 0324ABC-7", "Serial Number: serial-1"),
        (r#""serial": "0324ABC""#, r#""serial": "serial-1""#),
        ("x1654324000718 (1654324000718)", "x1654324000718 (serial-1)"),
        ("hf_abcdefghijKLMNOP", "token-1"),
        ("xa-token-of-an-unknown-formy", "xtoken-1y"),
        ("export MY_SECRET='a b' NCCL_KEY=5", "export MY_SECRET='token-1' NCCL_KEY=token-2"),
        (
            r#"{"name": "X_TOKEN", "effect": "nccl", "value": "abc"}"#,
            r#"{"name": "X_TOKEN", "effect": "nccl", "value": "token-1"}"#,
        ),
        (r#"{"db_password": "a\"b"}"#, r#"{"db_password": "token-1"}"#),
        (r"HF_TOKEN=abc\nNEXT", r"HF_TOKEN=token-1\nNEXT"),
        ("--token 0123456789abcdef0123456789abcdef", "--token token-1"),
        ("0123456789abcdef0123456789abcdef", "token-1"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer token-1"),
        ("https://me:pass@[::1]/z", "https://token-1@[::1]/z"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBnT3sGm", "ssh-ed25519 token-1"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----", "token-1"),
    ] {
        assert_eq!(scrub(text), expected, "{text}");
    }
}

#[test]
fn a_secret_with_blanks_is_left_out_and_found_however_it_is_folded() {
    let mut known = known();
    known.add_variable("NCCL_PASSWORD", " correct horse \"battery\tstaple ");
    let mut scrubber = Scrubber::new(known, Keep::default());
    for (text, expected) in [
        ("NCCL_PASSWORD=correct horse \"battery\tstaple", "NCCL_PASSWORD=token-1"),
        ("NCCL_PASSWORD=correct horse\n      \"battery\n staple  nccl: x", "NCCL_PASSWORD=token-1  nccl: x"),
        (r#"{"value": " correct horse \"battery\tstaple "}"#, r#"{"value": " token-1 "}"#),
        (r#""x correct\n  horse \"battery\u0009staple""#, r#""x token-1""#),
    ] {
        let found = scrubber.survivors(text);
        // The last look has no need of JSON's rarest escapes.
        assert!(found == ["a token"] || text.contains("u0009"), "{text}: {found:?}");
        let said = scrubber.scrub(text);
        assert_eq!(said, expected, "{text}");
        assert_eq!(scrubber.survivors(&said), [""; 0], "{text}");
    }
}

#[test]
fn what_is_no_ones_stays() {
    for text in [
        "NCCL version 2.28.3+cuda13.0, driver 580.95.05, firmware 28.45.4028, GLIBC 2.39",
        "version 8.8.4.1 v8.8.4.1 libx.so.8.8.4.1",
        "0000:01:00.0 000f:01:00.0 0002:01:00.1 pci0000:00",
        "12:34:56 2026-11-23T12:34:56.789 23:59",
        "127.0.0.1 0.0.0.0 255.255.255.0 255.0.0.0 255.255.255.255 :: ::1 ::ffff:127.0.0.1",
        "00:00:00:00:00:00 ff:ff:ff:ff:ff:ff 0x0000000000000000",
        "crate::fabric::abi std::env Self::add a::Z ::new()",
        "build id c0db936000000000000000000000000000000000, hash 5f2c0c1f0c6ee8a1",
        "NVD0000000087 rocep1s0f0:1 enp1s0f0np0 nccl-spark NET/Spark /root root@",
        "200 Gb/s 1.5 2.25.1 64K 4x224054 rkey=0x1234 lkey: 5 keys: 8",
        "SPARK_DOCTOR_TOKEN or --token-file FILE; the token that it printed",
        "{\"schema\": 1, \"gids\": [\"::\"]}",
    ] {
        assert_eq!(scrub(text), text);
    }
}

#[test]
fn what_is_asked_for_is_kept_but_for_tokens() {
    let text = "atlas margarete a@b.example 192.168.177.11 4c:bb:47:2d:19:e3 1654324000718 hf_abcdefghijKLMNOP";
    let keep = Keep { names: true, addresses: true, serials: true };
    let said = Scrubber::new(known(), keep).scrub(text);
    assert_eq!(said, text.replace("hf_abcdefghijKLMNOP", "token-1"));
    for (keep, kept) in [
        (Keep { names: true, ..Keep::default() }, "atlas margarete a@b.example ip4-net1.1 mac-1 serial-1 token-1"),
        (
            Keep { addresses: true, ..Keep::default() },
            "host-1 user-1 email-1 192.168.177.11 4c:bb:47:2d:19:e3 serial-1 token-1",
        ),
        (Keep { serials: true, ..Keep::default() }, "host-1 user-1 email-1 ip4-net1.1 mac-1 1654324000718 token-1"),
    ] {
        assert_eq!(Scrubber::new(known(), keep).scrub(text), kept);
    }
}

#[test]
fn a_host_may_be_called_as_a_pseudonym_is() {
    let mut known = Known::default();
    known.add_host("host-2");
    known.add_host("zeus");
    let mut scrubber = Scrubber::new(known, Keep::default());
    let said = scrubber.scrub("host-2 zeus host-2");
    assert!(scrubber.survivors(&said).is_empty() && said == "host-1 host-3 host-1", "{said}");
}

#[test]
fn the_last_look_finds_each_kind_that_a_rule_let_pass() {
    let scrubber = scrubber();
    for (text, kind) in [
        ("x gx10-a1b2 x", "a host name"),
        ("in Lab.Example.org.", "a host name"),
        ("MARGARETE", "a user name"),
        ("(1654324000718)", "a serial number"),
        ("a-token-of-an-unknown-form", "a token"),
        ("4C-bb:47.2d19e3", "a hardware address"),
        ("x192.168.177.11x", "an IP address or GID"),
        ("::ffff:c0a8:b10b", "an IP address or GID"),
        ("2001:db8:7::11", "an IP address or GID"),
        ("2001:0db8:0007:0000:0000:0000:0000:0011", "an IP address or GID"),
        ("fe80::4ebb:47ff:fe2d:19e3", "an IP address or GID"),
        ("fc4c:ea03:00f9:4230", "a GUID"),
    ] {
        assert!(scrubber.survivors(text).contains(&kind), "{text}: {:?}", scrubber.survivors(text));
    }
    assert_eq!(scrubber.survivors("192.168.177.112 gx10-a1b22 atlas1 nothing"), [""; 0]);
}

/// Something before and after an address that does not belong to it.
fn surroundings() -> impl Strategy<Value = (String, String)> {
    let before = prop_oneof![
        Just(String::new()),
        "[ ,;=(\\[<|\"'@/_-]{1,3}",
        "[g-uw-z]{1,9}[ =(\"]",
        Just("\\n".to_owned()),
        Just("\\t".to_owned()),
        Just("\\u00e9".to_owned()),
        Just("addr: ".to_owned()),
        Just("über ".to_owned()),
    ];
    let after = prop_oneof![
        Just(String::new()),
        "[ ,;)\\]>|\"'%_]{1,3}",
        Just("/24".to_owned()),
        Just(". ".to_owned()),
        Just(": ".to_owned()),
        Just("\\n".to_owned()),
        "[ %][a-z0-9]{1,9}",
    ];
    (before, after)
}

fn mac_forms(mac: [u8; 6]) -> Vec<String> {
    let digits = mac.map(|byte| format!("{byte:02x}"));
    let plain = digits.concat();
    let dotted = format!("{}.{}.{}", &plain[..4], &plain[4..8], &plain[8..]);
    vec![digits.join(":"), digits.join("-"), digits.join(":").to_uppercase(), dotted, format!("enx{plain}")]
}

fn gid_forms(gid: Ipv6Addr) -> Vec<String> {
    let groups = gid.segments();
    let sysfs = groups.map(|group| format!("{group:04x}")).join(":");
    let plain = groups.map(|group| format!("{group:x}")).join(":");
    vec![gid.to_string(), sysfs.to_uppercase(), sysfs, plain]
}

/// None of the forms is in the text, in capitals or not.
fn is_gone(said: &str, forms: &[String]) -> bool {
    let lower = said.to_ascii_lowercase();
    forms.iter().all(|form| !lower.contains(&form.to_ascii_lowercase()))
}

fn stays_by_rule(v4: std::net::Ipv4Addr) -> bool {
    v4.is_loopback() || v4.octets()[0] == 0 || v4.octets()[0] == 255
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_ipv4_address_survives(bytes: [u8; 4], (before, after) in surroundings()) {
        let v4 = std::net::Ipv4Addr::from(bytes);
        prop_assume!(!stays_by_rule(v4));
        let mapped = v4.to_ipv6_mapped();
        for form in [v4.to_string(), format!("::ffff:{v4}"), gid_forms(mapped)[1].clone(), gid_forms(mapped)[3].clone()] {
            let said = scrub(&format!("{before}{form}{after}"));
            prop_assert!(is_gone(&said, &[form]) && !said.contains(&v4.to_string()), "{said}");
        }
    }

    #[test]
    fn no_ipv6_address_or_gid_survives(bits: u128, zeros in 0..8_u32, (before, after) in surroundings()) {
        let gid = Ipv6Addr::from(bits & !(((1_u128 << (16 * zeros)) - 1) << 16) | (0x2000_u128 << 112));
        for form in gid_forms(gid) {
            let said = scrub(&format!("{before}{form}{after}"));
            prop_assert!(is_gone(&said, &gid_forms(gid)), "{form}: {said}");
            // Not a part of it either.
            let name = said.strip_prefix(&before).and_then(|rest| rest.strip_suffix(&after)).unwrap_or_default();
            let is_name = name.starts_with("ip6-") && name.len() < 12;
            prop_assert!(is_name, "{form}: {said}");
        }
    }

    #[test]
    fn no_hardware_address_survives(mac: [u8; 6], (before, after) in surroundings()) {
        prop_assume!(mac != [0; 6] && mac != [0xff; 6]);
        for form in mac_forms(mac) {
            let said = scrub(&format!("{before}{form}{after}"));
            prop_assert!(is_gone(&said, &mac_forms(mac)), "{form}: {said}");
        }
    }

    #[test]
    fn no_guid_survives(guid in 1_u64.., (before, after) in surroundings()) {
        let plain = format!("{guid:016x}");
        let groups = [&plain[..4], &plain[4..8], &plain[8..12], &plain[12..]].join(":");
        prop_assume!(guid != u64::MAX);
        for form in [groups, format!("0x{plain}")] {
            let said = scrub(&format!("{before}{form}{after}"));
            prop_assert!(is_gone(&said, &[form]), "{said}");
        }
    }

    #[test]
    fn equal_things_are_equal_and_others_are_not(one: u32, other: u32, gid: u128, mac: [u8; 6]) {
        let (one, other) = (std::net::Ipv4Addr::from(one), std::net::Ipv4Addr::from(other));
        prop_assume!(one != other && !stays_by_rule(one) && !stays_by_rule(other));
        let mut scrubber = scrubber();
        let said = scrubber.scrub(&format!("{one} {other} {one}"));
        let words: Vec<&str> = said.split(' ').collect();
        prop_assert!(words[0] == words[2] && words[0] != words[1], "{said}");
        prop_assert_eq!(scrubber.scrub(&one.to_string()), words[0]);
        let text = format!("{one}/24 {} {} 7 {other}", mac_forms(mac)[0], gid_forms(gid.into())[1]);
        let once = scrubber.scrub(&text);
        // By itself, and by one that knows nothing of it.
        prop_assert_eq!(scrubber.scrub(&once), once.clone());
        prop_assert_eq!(Scrubber::new(known(), Keep::default()).scrub(&once), once);
    }

    #[test]
    fn any_text_can_be_scrubbed_and_scrubbing_twice_changes_nothing(text in "[ -~\\n\\\\é:.@/=0-9a-f]{0,60}") {
        let mut scrubber = scrubber();
        let once = scrubber.scrub(&text);
        prop_assert_eq!(scrubber.scrub(&once), once.clone());
        prop_assert!(scrubber.survivors(&once).is_empty(), "{once}");
    }
}
