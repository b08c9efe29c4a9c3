//! Loads the built library and looks functions up in it, as programs do. [`End`] is one end of a
//! connection on it.

use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use verbs_sys::*;

pub const PATH: &str = env!("CARGO_BIN_EXE_softverbs-ibverbs");
pub const FABRIC: &str = "c_surface";

pub fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(FABRIC)
}

/// Loads a library and keeps its symbols local. Returns null if the library cannot be loaded.
pub fn open(path: &str) -> *mut c_void {
    let path = CString::new(path).unwrap();
    // SAFETY: a C string. The library's initialisers have no conditions for callers.
    unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) }
}

/// Looks a symbol up. Returns null if the library does not have it in exactly this version.
pub fn look_up(library: *mut c_void, name: &str, version: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    let version = CString::new(version).unwrap();
    // SAFETY: the library is open, and both are C strings.
    unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) }
}

pub fn has(library: *mut c_void, name: &str) -> bool {
    let name = CString::new(name).unwrap();
    // SAFETY: the library is open, and the name is a C string.
    !unsafe { libc::dlsym(library, name.as_ptr()) }.is_null()
}

/// Returns the library under test. The first call sets the environment variables that the library
/// reads.
pub fn handle() -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let handle = HANDLE.get_or_init(|| {
        std::fs::create_dir_all(dir()).unwrap();
        // SAFETY: this runs once, before the library is loaded, and no other code reads the
        // environment at that time.
        unsafe {
            std::env::set_var("SOFTVERBS_DIR", dir());
            std::env::set_var("SOFTVERBS_FABRIC", FABRIC);
            std::env::set_var("SOFTVERBS_NODE", "0");
            std::env::set_var("SOFTVERBS_PROFILE", "unpaced");
        }
        let handle = open(PATH);
        assert!(!handle.is_null(), "{PATH} cannot be loaded");
        handle.expose_provenance()
    });
    std::ptr::with_exposed_provenance_mut(*handle)
}

/// Calls the function `$name`, of version 1.1 unless another is given.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => { call!("IBVERBS_1.1", $name($($argument),*)) };
    ($version:literal, $name:ident($($argument:expr),*)) => {{
        let symbol = $crate::library::look_up($crate::library::handle(), stringify!($name), $version);
        // SAFETY: the type is made from the function's declaration in the header. A null pointer
        // becomes `None`.
        let function = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, type_of!($name)>(symbol)
        };
        let function = function.expect(concat!(stringify!($name), " in ", $version));
        // SAFETY: each test passes live objects.
        unsafe { function($($argument),*) }
    }};
}

macro_rules! type_of {
    (ibv_get_device_list) => {
        verbs_sys::fn_ibv_get_device_list
    };
    (ibv_free_device_list) => {
        verbs_sys::fn_ibv_free_device_list
    };
    (ibv_get_device_name) => {
        verbs_sys::fn_ibv_get_device_name
    };
    (ibv_get_device_guid) => {
        verbs_sys::fn_ibv_get_device_guid
    };
    (ibv_open_device) => {
        verbs_sys::fn_ibv_open_device
    };
    (ibv_close_device) => {
        verbs_sys::fn_ibv_close_device
    };
    (ibv_query_device) => {
        verbs_sys::fn_ibv_query_device
    };
    (ibv_query_port) => {
        verbs_sys::fn_ibv_query_port
    };
    (ibv_query_gid) => {
        verbs_sys::fn_ibv_query_gid
    };
    (_ibv_query_gid_ex) => {
        verbs_sys::fn__ibv_query_gid_ex
    };
    (_ibv_query_gid_table) => {
        verbs_sys::fn__ibv_query_gid_table
    };
    (ibv_query_port_speed) => {
        verbs_sys::fn_ibv_query_port_speed
    };
    (ibv_alloc_pd) => {
        verbs_sys::fn_ibv_alloc_pd
    };
    (ibv_dealloc_pd) => {
        verbs_sys::fn_ibv_dealloc_pd
    };
    (ibv_reg_mr) => {
        verbs_sys::fn_ibv_reg_mr
    };
    (ibv_reg_dmabuf_mr) => {
        verbs_sys::fn_ibv_reg_dmabuf_mr
    };
    (ibv_dereg_mr) => {
        verbs_sys::fn_ibv_dereg_mr
    };
    (ibv_create_comp_channel) => {
        verbs_sys::fn_ibv_create_comp_channel
    };
    (ibv_destroy_comp_channel) => {
        verbs_sys::fn_ibv_destroy_comp_channel
    };
    (ibv_get_cq_event) => {
        verbs_sys::fn_ibv_get_cq_event
    };
    (ibv_ack_cq_events) => {
        verbs_sys::fn_ibv_ack_cq_events
    };
    (ibv_create_cq) => {
        verbs_sys::fn_ibv_create_cq
    };
    (ibv_destroy_cq) => {
        verbs_sys::fn_ibv_destroy_cq
    };
    (ibv_create_srq) => {
        verbs_sys::fn_ibv_create_srq
    };
    (ibv_create_qp) => {
        verbs_sys::fn_ibv_create_qp
    };
    (ibv_modify_qp) => {
        verbs_sys::fn_ibv_modify_qp
    };
    (ibv_query_qp) => {
        verbs_sys::fn_ibv_query_qp
    };
    (ibv_query_ece) => {
        verbs_sys::fn_ibv_query_ece
    };
    (ibv_destroy_qp) => {
        verbs_sys::fn_ibv_destroy_qp
    };
    (ibv_get_async_event) => {
        verbs_sys::fn_ibv_get_async_event
    };
    (ibv_ack_async_event) => {
        verbs_sys::fn_ibv_ack_async_event
    };
}
pub(crate) use {call, type_of};

pub fn zeroed<T>() -> T {
    // SAFETY: only for structs of integers, pointers and unions of them.
    unsafe { std::mem::zeroed() }
}

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

pub fn open_device(index: usize) -> *mut ibv_context {
    let mut count = 0;
    let list = call!(ibv_get_device_list(&raw mut count));
    assert!(index < count as usize, "device {index} of {count}");
    // SAFETY: the list has `count` entries.
    let device = unsafe { *list.add(index) };
    let context = call!(ibv_open_device(device));
    call!(ibv_free_device_list(list));
    assert!(!context.is_null());
    context
}

/// One end of a connection: a queue pair with its own completion queue and 4096 bytes of registered
/// memory.
pub struct End {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub mr: *mut ibv_mr,
    pub memory: Box<[u8; 4096]>,
}

impl End {
    pub fn new(context: *mut ibv_context, channel: *mut ibv_comp_channel) -> Self {
        let pd = call!(ibv_alloc_pd(context));
        let cq = call!(ibv_create_cq(context, 64, std::ptr::null_mut(), channel, 0));
        let mut memory = Box::new([0u8; 4096]);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        let mr = call!(ibv_reg_mr(
            pd,
            memory.as_mut_ptr().cast(),
            4096,
            access as c_int
        ));
        let mut init = Self::attributes(cq);
        let qp = call!(ibv_create_qp(pd, &raw mut init));
        assert!(
            ![pd.cast::<c_void>(), cq.cast(), mr.cast(), qp.cast()].contains(&std::ptr::null_mut())
        );
        Self {
            context,
            pd,
            cq,
            qp,
            mr,
            memory,
        }
    }

    pub fn attributes(cq: *mut ibv_cq) -> ibv_qp_init_attr {
        let mut init: ibv_qp_init_attr = zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, IBV_QPT_RC);
        init.cap = ibv_qp_cap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        init
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).qp_num }
    }

    pub fn modify(&self, mut attributes: ibv_qp_attr, mask: u32) -> c_int {
        call!(ibv_modify_qp(self.qp, &raw mut attributes, mask as c_int))
    }

    pub fn to_init(&self) -> c_int {
        let mut attributes: ibv_qp_attr = zeroed();
        (attributes.qp_state, attributes.port_num) = (IBV_QPS_INIT, 1);
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        self.modify(
            attributes,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        )
    }

    pub fn to_rtr(&self, peer: &Self) -> c_int {
        let mut attributes: ibv_qp_attr = zeroed();
        (attributes.qp_state, attributes.path_mtu) = (IBV_QPS_RTR, IBV_MTU_1024);
        (attributes.dest_qp_num, attributes.min_rnr_timer) = (peer.number(), 12);
        (attributes.max_dest_rd_atomic, attributes.ah_attr.port_num) = (1, 1);
        (
            attributes.ah_attr.is_global,
            attributes.ah_attr.grh.sgid_index,
        ) = (1, 1);
        call!(ibv_query_gid(
            peer.context,
            1,
            1,
            &raw mut attributes.ah_attr.grh.dgid
        ));
        let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        self.modify(
            attributes,
            mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        )
    }

    pub fn to_rts(&self) -> c_int {
        let mut attributes: ibv_qp_attr = zeroed();
        (
            attributes.qp_state,
            attributes.timeout,
            attributes.max_rd_atomic,
        ) = (IBV_QPS_RTS, 18, 1);
        (attributes.retry_cnt, attributes.rnr_retry) = (7, 7);
        let mask =
            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN;
        self.modify(attributes, mask | IBV_QP_MAX_QP_RD_ATOMIC)
    }

    pub fn piece(&self, offset: usize, bytes: u32) -> ibv_sge {
        // SAFETY: the region is alive.
        let lkey = unsafe { (*self.mr).lkey };
        ibv_sge {
            addr: self.memory.as_ptr().expose_provenance() as u64 + offset as u64,
            length: bytes,
            lkey,
        }
    }

    pub fn post(
        &self,
        opcode: u32,
        flags: u32,
        mut piece: ibv_sge,
        peer: &Self,
        offset: u64,
        wr_id: u64,
    ) -> c_int {
        let mut request: ibv_send_wr = zeroed();
        (request.wr_id, request.opcode, request.send_flags) = (wr_id, opcode, flags);
        (request.sg_list, request.num_sge) = (&raw mut piece, 1);
        request.__bindgen_anon_1.imm_data = 0x0102_0304;
        // SAFETY: the region is alive.
        let rkey = unsafe { (*peer.mr).rkey };
        let remote_addr = peer.memory.as_ptr().expose_provenance() as u64 + offset;
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        self.post_chain(&mut request).0
    }

    /// Posts a chain of sends. Returns the result, and the request that failed.
    pub fn post_chain(&self, first: &mut ibv_send_wr) -> (c_int, *mut ibv_send_wr) {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the context is open, the queue pair alive, and the chain lives for the call.
        let status =
            unsafe { (*self.context).ops.post_send.unwrap()(self.qp, first, &raw mut bad) };
        (status, bad)
    }

    pub fn post_pieces(&self, count: usize, flags: u32, peer: &Self) -> c_int {
        let mut pieces = vec![self.piece(0, 8); count];
        let mut request: ibv_send_wr = zeroed();
        (request.opcode, request.send_flags) = (IBV_WR_RDMA_WRITE, flags);
        (request.sg_list, request.num_sge) = (pieces.as_mut_ptr(), count as c_int);
        // SAFETY: the region is alive.
        let rkey = unsafe { (*peer.mr).rkey };
        let remote_addr = peer.memory.as_ptr().expose_provenance() as u64;
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        self.post_chain(&mut request).0
    }

    pub fn post_receive(&self, mut piece: ibv_sge, wr_id: u64) -> c_int {
        let mut bad = std::ptr::null_mut();
        let next = std::ptr::null_mut();
        let mut request = ibv_recv_wr {
            wr_id,
            next,
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        // SAFETY: the context is open, the queue pair alive, and the request lives for the call.
        unsafe { (*self.context).ops.post_recv.unwrap()(self.qp, &raw mut request, &raw mut bad) }
    }

    /// Waits for a completion without a time limit, so that the result does not depend on timing.
    pub fn completion(&self) -> ibv_wc {
        let mut completion: ibv_wc = zeroed();
        loop {
            // SAFETY: the context is open, the queue alive, and there is room for one.
            match unsafe { (*self.context).ops.poll_cq.unwrap()(self.cq, 1, &raw mut completion) } {
                0 => std::thread::yield_now(),
                count => {
                    assert_eq!(count, 1);
                    return completion;
                }
            }
        }
    }

    pub fn end(self) {
        assert_eq!(call!(ibv_destroy_qp(self.qp)), 0);
        assert_eq!(call!(ibv_destroy_cq(self.cq)), 0);
        assert_eq!(call!(ibv_dereg_mr(self.mr)), 0);
        assert_eq!(call!(ibv_dealloc_pd(self.pd)), 0);
    }
}

pub fn connected(context: *mut ibv_context, channel: *mut ibv_comp_channel) -> (End, End) {
    let a = End::new(context, channel);
    let b = End::new(context, channel);
    for (end, peer) in [(&a, &b), (&b, &a)] {
        assert_eq!((end.to_init(), end.to_rtr(peer), end.to_rts()), (0, 0, 0));
    }
    (a, b)
}
