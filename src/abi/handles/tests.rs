use super::*;
use crate::abi::guard;
use nccl_abi::NcclResult;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Fake {
    parted: Arc<AtomicUsize>,
}

impl Comm for Fake {
    const MARK: Mark = Mark(7);
    const REQUEST_MARK: Mark = Mark(8);
    const REQUESTS: usize = 3;
}

fn fake() -> (*mut c_void, Arc<AtomicUsize>) {
    let parted = Arc::new(AtomicUsize::new(0));
    (
        CommHandle::into_raw(Fake {
            parted: parted.clone(),
        }),
        parted,
    )
}

fn use_it(raw: *mut c_void, faulty: bool) -> NcclResult {
    guard::call("use", |scope| {
        // SAFETY: the tests pass open comms.
        let endpoint = unsafe { CommHandle::<Fake>::enter(raw, "comm", scope) }?;
        assert!(
            !faulty,
            "on purpose, {} parted",
            endpoint.comm().parted.load(Ordering::Relaxed)
        );
        Ok(())
    })
}

fn close_it(raw: *mut c_void) -> NcclResult {
    let part = |fake: &Fake| _ = fake.parted.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the tests close a comm once.
    guard::call("close", |scope| unsafe { close(raw, "comm", scope, part) })
}

#[test]
fn a_broken_comm_is_refused_and_freed_unused_while_another_continues() {
    let ((one, one_parted), (other, other_parted)) = (fake(), fake());
    assert_eq!(use_it(one, true), NcclResult::INTERNAL_ERROR);
    assert_eq!(use_it(one, false), NcclResult::INTERNAL_ERROR);
    assert_eq!(use_it(other, false), NcclResult::SUCCESS);
    assert_eq!(
        (close_it(one), close_it(other)),
        (NcclResult::SUCCESS, NcclResult::SUCCESS)
    );
    assert_eq!(
        (
            one_parted.load(Ordering::Relaxed),
            other_parted.load(Ordering::Relaxed)
        ),
        (1, 1)
    );
    // A broken comm is leaked, so it still has its reference to the counter.
    assert_eq!(
        (
            Arc::strong_count(&one_parted),
            Arc::strong_count(&other_parted)
        ),
        (2, 1)
    );
}

#[test]
fn an_unopened_object_may_be_closed() {
    assert_eq!(close_it(std::ptr::null_mut()), NcclResult::SUCCESS);
}

#[test]
fn a_pointer_to_another_kind_is_refused_with_an_error() {
    let (raw, _parted) = fake();
    let refusal = |text: Quick<()>| text.unwrap_err().to_string();
    let result = guard::call("use", |scope| {
        // SAFETY: NULL is allowed, and so is a pointer to a comm of any type.
        unsafe {
            let null = CommHandle::<RailSendComm>::enter(ptr_null(), "sendComm", scope).map(|_| ());
            assert_eq!(refusal(null), "sendComm is NULL");
            let wrong = CommHandle::<RailSendComm>::enter(raw, "sendComm", scope).map(|_| ());
            assert_eq!(
                refusal(wrong),
                "sendComm is an unknown object; it must be a send comm"
            );
            let no_request = RailComm::of_request(raw, "request", scope).map(|_| ());
            assert!(
                refusal(no_request).starts_with("request is"),
                "a comm is not a request"
            );
            let crooked = CommHandle::<Fake>::enter(raw.byte_add(1), "comm", scope).map(|_| ());
            assert_eq!(
                refusal(crooked),
                "comm is not a pointer that this plugin returned"
            );
        }
        Ok(())
    });
    assert_eq!(result, NcclResult::SUCCESS);
    close_it(raw);
}

#[test]
fn every_request_number_has_its_own_place_that_names_its_comm() {
    let (raw, _parted) = fake();
    // SAFETY: the comm is open.
    let endpoint = unsafe { &*raw.cast::<CommHandle<Fake>>() };
    let places: Vec<_> = (0..3)
        .map(|number| endpoint.request(number).unwrap())
        .collect();
    for (number, place) in places.iter().enumerate() {
        // SAFETY: these are requests of the open comm.
        let request = unsafe { &*place.cast::<RequestHandle>() };
        assert_eq!(
            (request.number as usize, request.endpoint.as_ptr()),
            (number, raw)
        );
    }
    assert!(places.iter().all(
        |place| !place.is_null() && places.iter().filter(|other| *other == place).count() == 1
    ));
    assert!(endpoint.request(3).is_err());
    close_it(raw);
}

fn ptr_null() -> *mut c_void {
    std::ptr::null_mut()
}
