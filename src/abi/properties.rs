//! The description of a device, in each interface version's layout.

use crate::plugin;
use nccl_abi::net::*;
use std::ffi::c_int;
use std::ptr;

pub(super) trait FromDevice {
    fn new(dev: c_int, of: &plugin::DeviceProperties) -> Self;
}

/// `pci_path` is NULL: from the path of one PCI function, NCCL would take that function's x4 link
/// as the speed of the merged device. A Spark has no GPUDirect RDMA: its NICs cannot access the
/// GPU's memory. So only host pointers are supported, and NCCL never needs a flush. `reg_is_global`
/// is 0, because memory that was registered with a send comm has no key for peers, and cannot be
/// received into. (With 1, NCCL 2.20 to 2.23 also connects a comm to itself for each
/// `ncclCommRegister`.)
impl<Flush: Default, More: FromDevice> FromDevice for Properties<Flush, More> {
    fn new(dev: c_int, of: &plugin::DeviceProperties) -> Self {
        Self {
            name: of.name.as_ptr(),
            pci_path: ptr::null(),
            guid: of.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 0,
            // 0 since v9. In v8 the type is `()`, because v8 has no such field.
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

impl FromDevice for () {
    fn new(_: c_int, _: &plugin::DeviceProperties) {}
}

impl FromDevice for MorePropertiesV9 {
    fn new(dev: c_int, of: &plugin::DeviceProperties) -> Self {
        Self {
            v_props: alone(dev),
            max_p2p_bytes: of.max_p2p_bytes,
            max_coll_bytes: of.max_coll_bytes,
        }
    }
}

impl FromDevice for MorePropertiesV11 {
    fn new(dev: c_int, of: &plugin::DeviceProperties) -> Self {
        Self {
            v_props: alone(dev),
            max_p2p_bytes: of.max_p2p_bytes,
            max_coll_bytes: of.max_coll_bytes,
            max_multi_request_size: 1,
        }
    }
}

impl FromDevice for MorePropertiesV12 {
    fn new(dev: c_int, of: &plugin::DeviceProperties) -> Self {
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

/// Returns NCCL's list of the devices that form device `dev`. NCCL itself has not merged any
/// devices, so the list has only `dev`.
fn alone<const N: usize>(dev: c_int) -> VDeviceProps<N> {
    let mut devs = [0; N];
    devs[0] = dev;
    VDeviceProps { ndevs: 1, devs }
}
