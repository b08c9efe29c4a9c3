//! What NCCL is told about a device, in each version's shape.

use super::types::*;
use crate::plugin;
use std::ffi::c_int;
use std::ptr;

/// Properties, or the part of them that a version has more.
pub(super) trait Described {
    /// Those of device `dev`.
    fn new(dev: c_int, of: &plugin::Properties) -> Self;
}

/// `pciPath` is NULL: with the path of one function NCCL would take the merged device for that function's x4 link.
/// Pointers are host pointers, because the GPU of this machine neither reads nor writes through the network; so a flush
/// is never needed. Memory is registered with the device and not with a comm.
impl<Flush: Default, More: Described> Described for Properties<Flush, More> {
    fn new(dev: c_int, of: &plugin::Properties) -> Self {
        Self {
            name: of.name.as_ptr(),
            pci_path: ptr::null(),
            guid: of.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 1,
            // 0, or nothing.
            force_flush: Flush::default(),
            speed: of.speed_mbps,
            port: 1,
            latency: of.latency_us,
            max_comms: of.max_comms,
            max_recvs: of.max_recvs,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: NET_DEVICE_INVALID_VERSION,
            more: More::new(dev, of),
        }
    }
}

impl Described for () {
    fn new(_: c_int, _: &plugin::Properties) {}
}

impl Described for MorePropertiesV9 {
    fn new(dev: c_int, of: &plugin::Properties) -> Self {
        Self { v_props: alone(dev), max_p2p_bytes: of.max_p2p_bytes, max_coll_bytes: of.max_coll_bytes }
    }
}

impl Described for MorePropertiesV11 {
    fn new(dev: c_int, of: &plugin::Properties) -> Self {
        Self {
            v_props: alone(dev),
            max_p2p_bytes: of.max_p2p_bytes,
            max_coll_bytes: of.max_coll_bytes,
            max_multi_request_size: 1,
        }
    }
}

impl Described for MorePropertiesV12 {
    fn new(dev: c_int, of: &plugin::Properties) -> Self {
        Self {
            v_props: alone(dev),
            max_p2p_bytes: of.max_p2p_bytes,
            max_coll_bytes: of.max_coll_bytes,
            max_multi_request_size: 1,
            rail_id: UNDEFINED as i16,
            plane_id: UNDEFINED as i16,
        }
    }
}

/// A device that, as NCCL counts them, is merged from itself alone.
fn alone<const N: usize>(dev: c_int) -> VDeviceProps<N> {
    let mut devs = [0; N];
    devs[0] = dev;
    VDeviceProps { ndevs: 1, devs }
}
