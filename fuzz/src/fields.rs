//! Checks of the fields that handshake messages and control messages share.

use proto::wire::fields::{Attachment, QpEnd, RailAdvert};

pub(crate) const NAME_BYTES: usize = 64;
pub(crate) const MAX_LIST: usize = 16;
const MAX_MBPS: u32 = 10_000_000;

pub(crate) fn text_fits(text: &str, most: usize) {
    assert!(
        text.len() <= most && !text.chars().any(char::is_control),
        "{text:?}"
    );
}

pub(crate) fn check_rail(rail: &RailAdvert) {
    text_fits(&rail.name, NAME_BYTES);
    text_fits(&rail.phys_port, NAME_BYTES);
    check_attachment(&rail.attachment);
    check_mtu(rail.mtu_bytes);
    assert!((1..=MAX_MBPS).contains(&rail.speed_mbps) && rail.addresses.len() <= MAX_LIST);
    assert!(
        rail.addresses
            .iter()
            .all(|address| address.prefix.is_none_or(|prefix| prefix <= 128))
    );
}

pub(crate) fn check_queue_pairs(qps: &[QpEnd]) {
    assert!(
        qps.len() <= MAX_LIST && qps.iter().all(|qp| qp.number < 1 << 24 && qp.psn < 1 << 24),
        "{qps:?}"
    );
}

pub(crate) fn check_attachment(at: &Attachment) {
    assert!(
        at.link_mbps <= MAX_MBPS && (1..=MAX_MBPS).contains(&at.port_mbps),
        "{at:?}"
    );
}

pub(crate) fn check_mtu(bytes: u32) {
    assert!([256, 512, 1024, 2048, 4096].contains(&bytes), "{bytes}");
}
