//! Asynchronous events of a device: port and address changes, failed QPs and CQs.

use std::io;
use std::os::fd::BorrowedFd;

use super::context::Context;
use host::error::{Call, Error, Result};
use verbs_sys::*;

/// An event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Kind (`enum ibv_event_type`). The constants below are the kinds that the plugin acts on.
    pub kind: u32,
    /// Port concerned, numbered from 1; `None` if the event is not about a port.
    pub port: Option<u8>,
    /// Number of the QP concerned; `None` if the event is not about a QP.
    pub qp_num: Option<u32>,
    /// Number of the CQ concerned ([`super::Cq::number`]); `None` if the event is not about a CQ.
    pub cq: Option<usize>,
}

impl AsyncEvent {
    /// The device was removed or has failed.
    pub const DEVICE_FATAL: u32 = IBV_EVENT_DEVICE_FATAL;
    /// A port went down.
    pub const PORT_ERROR: u32 = IBV_EVENT_PORT_ERR;
    /// A port came up.
    pub const PORT_ACTIVE: u32 = IBV_EVENT_PORT_ACTIVE;
    /// A port's GID table changed.
    pub const GID_CHANGE: u32 = IBV_EVENT_GID_CHANGE;

    /// Returns the event's name for log lines.
    pub fn text(&self) -> &'static str {
        match self.kind {
            IBV_EVENT_CQ_ERR => "CQ error",
            IBV_EVENT_QP_FATAL => "QP fatal error",
            IBV_EVENT_QP_REQ_ERR => "QP request error",
            IBV_EVENT_QP_ACCESS_ERR => "QP access error",
            IBV_EVENT_COMM_EST => "communication established",
            IBV_EVENT_SQ_DRAINED => "send queue drained",
            IBV_EVENT_DEVICE_FATAL => "device fatal error",
            IBV_EVENT_PORT_ACTIVE => "port active",
            IBV_EVENT_PORT_ERR => "port down",
            IBV_EVENT_LID_CHANGE => "LID change",
            IBV_EVENT_PKEY_CHANGE => "partition key change",
            IBV_EVENT_QP_LAST_WQE_REACHED => "last work request reached",
            IBV_EVENT_CLIENT_REREGISTER => "client reregister",
            IBV_EVENT_GID_CHANGE => "GID table change",
            _ => "other event",
        }
    }
}

impl Context {
    /// Returns the next pending event of the device, without blocking.
    ///
    /// # Errors
    /// [`Error::Os`] if the events cannot be read, as after the device was removed.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>> {
        if self.event_descriptor() < 0 {
            return Ok(None);
        }
        // SAFETY: integers and a union of pointers and integers; all zero is a valid value.
        let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the struct is a local.
        let status = unsafe { (self.library.get_async_event)(self.raw.as_ptr(), &raw mut event) };
        if status != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(Error::os(
                    Call::ReadEvents {
                        device: self.name().to_owned(),
                    },
                    &error,
                )),
            };
        }
        // SAFETY: the library has just filled in `event`, and it is not acknowledged yet.
        let described = unsafe { describe(&event) };
        // SAFETY: `event` came from the call above, and is acknowledged once.
        unsafe { (self.library.ack_async_event)(&raw mut event) };
        Ok(Some(described))
    }

    /// Returns a descriptor that is readable while an event is pending. `None` if a substitute
    /// library has no events.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.event_descriptor();
        // SAFETY: the context owns the descriptor and stays borrowed while it is used.
        (descriptor >= 0).then(|| unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    pub(super) fn make_events_nonblocking(&self) -> Result<()> {
        let descriptor = self.event_descriptor();
        if descriptor < 0 {
            return Ok(());
        }
        // SAFETY: the context owns the descriptor, and these two commands only change its flags.
        let failed = unsafe {
            let flags = libc::fcntl(descriptor, libc::F_GETFL);
            flags < 0 || libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0
        };
        if failed {
            return Err(Error::last_os(Call::NonBlockingEvents {
                device: self.name().to_owned(),
            }));
        }
        Ok(())
    }

    /// Returns the events' descriptor; negative if a substitute library has no events.
    fn event_descriptor(&self) -> i32 {
        // SAFETY: the context is open.
        unsafe { (*self.raw.as_ptr()).async_fd }
    }
}

/// # Safety
/// `event` came from the library and is not acknowledged yet. Until the acknowledgement, the
/// library does not destroy the event's object.
unsafe fn describe(event: &ibv_async_event) -> AsyncEvent {
    let mut described = AsyncEvent {
        kind: event.event_type,
        port: None,
        qp_num: None,
        cq: None,
    };
    match event.event_type {
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => {
            // SAFETY: for these kinds the union holds the QP, which is not destroyed before the
            // caller has acknowledged the event.
            described.qp_num = Some(unsafe { (*event.element.qp).qp_num });
        }
        IBV_EVENT_CQ_ERR => {
            // SAFETY: for this kind the union holds the CQ, which is alive for the same reason.
            described.cq = Some(unsafe { (*event.element.cq).cq_context }.addr());
        }
        IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => {
            // SAFETY: for these kinds the union holds the port's number.
            described.port = u8::try_from(unsafe { event.element.port_num }).ok();
        }
        _ => {}
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_its_object() {
        let port = ibv_async_event {
            element: ibv_async_event__bindgen_ty_1 { port_num: 1 },
            event_type: IBV_EVENT_PORT_ERR,
        };
        // SAFETY: the union holds the member for this kind.
        let described = unsafe { describe(&port) };
        assert_eq!(
            described,
            AsyncEvent {
                kind: AsyncEvent::PORT_ERROR,
                port: Some(1),
                qp_num: None,
                cq: None
            }
        );
        assert_eq!(described.text(), "port down");

        // SAFETY: integers, pointers and pthread objects that are not used.
        let mut qp: ibv_qp = unsafe { std::mem::zeroed() };
        qp.qp_num = 77;
        let fatal = ibv_async_event {
            element: ibv_async_event__bindgen_ty_1 { qp: &raw mut qp },
            event_type: IBV_EVENT_QP_FATAL,
        };
        // SAFETY: the union holds the member for this kind, a live QP.
        assert_eq!(unsafe { describe(&fatal) }.qp_num, Some(77));

        // SAFETY: integers, pointers and pthread objects that are not used.
        let mut cq: ibv_cq = unsafe { std::mem::zeroed() };
        cq.cq_context = std::ptr::without_provenance_mut(5);
        let overrun = ibv_async_event {
            element: ibv_async_event__bindgen_ty_1 { cq: &raw mut cq },
            event_type: IBV_EVENT_CQ_ERR,
        };
        // SAFETY: the union holds the member for this kind, a live CQ.
        assert_eq!(unsafe { describe(&overrun) }.cq, Some(5));

        let device = ibv_async_event {
            element: ibv_async_event__bindgen_ty_1 { port_num: 0 },
            event_type: IBV_EVENT_DEVICE_FATAL,
        };
        // SAFETY: the union is not read for this kind.
        let described = unsafe { describe(&device) };
        assert_eq!((described.port, described.qp_num), (None, None));
    }
}
