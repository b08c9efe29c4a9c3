//! Attributes of devices and ports.

use super::guard;
use super::handles::{self, DeviceHandle};
use crate::gid_table;
use crate::os::shm::{MAX_QPS, MAX_SGES, SEND_SLOTS};
use std::ffi::{c_int, c_uint};
use std::mem::{offset_of, size_of};
use verbs_sys::*;

/// Maximum number of completions that a program may request room for in one queue. Only this
/// interface has the limit; the core's queues have none.
pub(super) const MAX_CQE: c_int = 1 << 22;
/// Maximum number of RDMA reads under way on one queue pair, in each direction. Only this interface
/// checks it.
pub(super) const MAX_READS: u8 = 16;
/// Maximum numbers of queues, regions and domains that a device reports. Nothing enforces them.
const MANY: c_int = 1 << 16;

/// The only partition key of a port: the default key, with the bit for full membership.
const DEFAULT_PKEY: u16 = 0xffff;
/// Codes of a port's `phys_state` in the InfiniBand specification.
const PHYS_LINK_UP: u8 = 5;
const PHYS_DISABLED: u8 = 3;
/// Codes of `enum ibv_gid_type_sysfs` of libibverbs' private header.
const SYSFS_IB_ROCE_V1: c_int = 0;
const SYSFS_ROCE_V2: c_int = 1;

/// # Safety
/// `context` must be open, and `attributes` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attributes: *mut ibv_device_attr,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        // SAFETY: integers, for which zero is a value.
        let mut found: ibv_device_attr = unsafe { std::mem::zeroed() };
        for (place, byte) in found
            .fw_ver
            .iter_mut()
            .zip(concat!("softverbs ", env!("CARGO_PKG_VERSION")).bytes())
        {
            *place = byte as _;
        }
        found.node_guid = device.core().guid.to_be();
        found.sys_image_guid = found.node_guid;
        found.max_mr_size = u64::MAX;
        found.page_size_cap = 4096;
        found.max_qp = count(MAX_QPS);
        found.max_qp_wr = count(SEND_SLOTS);
        found.max_sge = count(MAX_SGES);
        found.max_sge_rd = count(MAX_SGES);
        found.max_cq = MANY;
        found.max_cqe = MAX_CQE;
        found.max_mr = MANY;
        found.max_pd = MANY;
        found.max_qp_rd_atom = c_int::from(MAX_READS);
        found.max_qp_init_rd_atom = c_int::from(MAX_READS);
        found.max_res_rd_atom = c_int::from(MAX_READS) * count(MAX_QPS);
        found.atomic_cap = IBV_ATOMIC_NONE;
        found.max_pkeys = 1;
        found.phys_port_cnt = 1;
        // SAFETY: writable, by the caller's promise.
        unsafe { attributes.write(found) };
        Ok(())
    })
}

/// Fills the struct of an older `verbs.h`, which ends where `port_cap_flags2` begins in the present
/// one.
///
/// # Safety
/// `context` must be open, and the struct must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attributes: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promise; the old struct is a prefix of the new one.
    unsafe {
        query_port(
            context,
            port,
            attributes.cast(),
            offset_of!(ibv_port_attr, port_cap_flags2),
        )
    }
}

/// The port query that `verbs.h` calls. `bytes` is the size of the struct in the caller's header.
///
/// # Safety
/// `context` must be open, and `attributes` must be valid for writes of `bytes` bytes.
pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
    bytes: usize,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let found = port_attributes(unsafe { handles::context(context) }?.device, port)?;
        let known = bytes.min(size_of::<ibv_port_attr>());
        // SAFETY: `attributes` is valid for writes of `bytes` bytes, by the caller's promise.
        unsafe {
            attributes.cast::<u8>().write_bytes(0, bytes);
            attributes
                .cast::<u8>()
                .copy_from_nonoverlapping((&raw const found).cast(), known);
        }
        Ok(())
    })
}

/// Writes the port's rate to `speed`, in units of 100 Mb/s.
///
/// # Safety
/// `context` must be open, and `speed` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port_speed(
    context: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        only_port(port)?;
        // SAFETY: writable, by the caller's promise.
        unsafe { speed.write(u64::from(device.core().speed_mbps).div_ceil(100)) };
        Ok(())
    })
}

/// # Safety
/// `context` must be open, and `gid` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        let index = u32::try_from(index).map_err(|_| libc::EINVAL)?;
        let found = match gid_entry(device, u32::from(port), index) {
            // As rdma-core's function of this name does with an empty entry.
            Err(libc::ENODATA) => ibv_gid { raw: [0; 16] },
            found => found?.gid,
        };
        // SAFETY: writable, by the caller's promise.
        unsafe { gid.write(found) };
        Ok(())
    })
}

/// Reports RoCE v2 for every address. rdma-core keeps this function for its own tools.
///
/// # Safety
/// `context` must be open, and `kind` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_int,
) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        let found = match gid_entry(device, u32::from(port), index) {
            // As rdma-core's function of this name does with an empty entry.
            Err(libc::ENODATA) => SYSFS_IB_ROCE_V1,
            found => found.map(|_| SYSFS_ROCE_V2)?,
        };
        // SAFETY: writable, by the caller's promise.
        unsafe { kind.write(found) };
        Ok(())
    })
}

/// # Safety
/// `context` must be open, and `entry` must be valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    bytes: usize,
) -> c_int {
    guard::status(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        if flags != 0 || bytes < size_of::<ibv_gid_entry>() {
            return Err(libc::EINVAL);
        }
        let found = gid_entry(device, port, index)?;
        // SAFETY: at least one entry is writable, by the caller's promise.
        unsafe { entry.write(found) };
        Ok(())
    })
}

/// `ibv_query_gid_table` of `verbs.h` calls this. Returns the number of entries, or `-errno`.
///
/// # Safety
/// `context` must be open, and `entries` must be valid for writes of `most` entries of `bytes`
/// bytes each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    most: usize,
    flags: u32,
    bytes: usize,
) -> isize {
    let written = guard::caught(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { handles::context(context) }?.device;
        let indices = 0..gid_table::ENTRIES as u32;
        let found: Vec<_> = indices
            .filter_map(|index| gid_entry(device, 1, index).ok())
            .collect();
        if flags != 0 || bytes < size_of::<ibv_gid_entry>() || most < found.len() {
            return Err(libc::EINVAL);
        }
        for (place, entry) in found.iter().enumerate() {
            // SAFETY: within the `most` entries that the caller promises; they are `bytes` apart.
            unsafe { entries.byte_add(place * bytes).write_unaligned(*entry) };
        }
        Ok(found.len())
    });
    match written {
        Ok(count) => isize::try_from(count).unwrap_or(isize::MAX),
        Err(errno) => -(errno as isize),
    }
}

/// # Safety
/// `context` must be open, and `pkey` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    guard::zero_or_minus_one(|| {
        // SAFETY: the caller's promise.
        unsafe { handles::context(context) }?;
        only_port(u32::from(port))?;
        if index != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: writable, by the caller's promise.
        unsafe { pkey.write(DEFAULT_PKEY.to_be()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(
    _context: *mut ibv_context,
    port: u8,
    pkey: __be16,
) -> c_int {
    if port == 1 && u16::from_be(pkey) == DEFAULT_PKEY {
        0
    } else {
        -1
    }
}

fn port_attributes(device: &DeviceHandle, port: u8) -> Result<ibv_port_attr, i32> {
    only_port(u32::from(port))?;
    let core = device.core();
    let up = device.node.port_up(device.index);
    let (active_width, active_speed) = width_and_speed(core.speed_mbps);
    // SAFETY: integers, for which zero is a value.
    let mut found: ibv_port_attr = unsafe { std::mem::zeroed() };
    found.state = if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    found.phys_state = if up { PHYS_LINK_UP } else { PHYS_DISABLED };
    found.max_mtu = mtu(core.mtu_bytes);
    found.active_mtu = found.max_mtu;
    found.gid_tbl_len = count(gid_table::ENTRIES);
    found.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    found.max_msg_sz = core.max_message_bytes;
    found.pkey_tbl_len = 1;
    found.max_vl_num = 1;
    found.active_width = active_width;
    found.active_speed = active_speed;
    found.link_layer = LINK_LAYER_ETHERNET;
    Ok(found)
}

/// Returns an entry of the GID table, or `ENODATA` for an empty one.
fn gid_entry(device: &DeviceHandle, port: u32, index: u32) -> Result<ibv_gid_entry, i32> {
    only_port(port)?;
    if index as usize >= gid_table::ENTRIES {
        return Err(libc::EINVAL);
    }
    let rail = device.node.rail(device.index);
    let gid = device.core().gid_at(rail, index as usize);
    Ok(ibv_gid_entry {
        gid: ibv_gid {
            raw: gid.ok_or(libc::ENODATA)?,
        },
        gid_index: index,
        port_num: port,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: 0,
    })
}

fn only_port(port: u32) -> Result<(), i32> {
    if port == 1 { Ok(()) } else { Err(libc::EINVAL) }
}

fn mtu(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

/// Returns the codes of a port's width and speed (`IB_WIDTH_*`, `IB_SPEED_*` of the kernel's
/// ib_verbs.h): those of the highest rate up to `mbps`, or of the slowest rate if all are higher.
/// 200 Gb/s has several pairs of codes. The result is the pair that an owner's Spark reports: two
/// lanes of NDR.
fn width_and_speed(mbps: u32) -> (u8, u8) {
    const SPARK_PORT: (u32, (u8, u8)) = (200_000, (16, 128));
    if mbps == SPARK_PORT.0 {
        return SPARK_PORT.1;
    }
    const WIDTHS: [(u8, u32); 5] = [(2, 4), (1, 1), (16, 2), (4, 8), (8, 12)];
    const SPEEDS: [(u8, u32); 7] = [
        (1, 2_500),
        (2, 5_000),
        (4, 10_000),
        (16, 14_000),
        (32, 25_000),
        (64, 50_000),
        (128, 100_000),
    ];
    let mut best = (1, 1);
    let mut best_mbps = 0;
    for (width, lanes) in WIDTHS {
        for (speed, lane_mbps) in SPEEDS {
            if lanes * lane_mbps <= mbps && lanes * lane_mbps > best_mbps {
                (best, best_mbps) = ((width, speed), lanes * lane_mbps);
            }
        }
    }
    best
}

fn count(value: usize) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_the_codes_that_real_ports_have() {
        assert_eq!(width_and_speed(100_000), (2, 32), "4 lanes of EDR");
        assert_eq!(
            width_and_speed(200_000),
            (16, 128),
            "2 lanes of NDR, a Spark's port"
        );
        assert_eq!(width_and_speed(400_000), (2, 128), "4 lanes of NDR");
        assert_eq!(width_and_speed(10_000), (2, 1), "4 lanes of SDR");
        assert_eq!(width_and_speed(111_000), (2, 32), "the nearest below");
        assert_eq!(width_and_speed(1), (1, 1));
    }

    #[test]
    fn mtus_are_the_largest_that_fit() {
        assert_eq!(
            [256, 511, 512, 1500, 4096, 9000].map(mtu),
            [1, 1, 2, 3, 5, 5]
        );
    }
}
