//! Single steps of the machine. `tests/device.rs` plays random orders of events.

use super::*;

#[test]
fn a_refused_query_alone_loses_no_rail() {
    let [none, port_error, device_fatal] =
        [(false, false), (true, false), (false, true)].map(|(port_error, device_fatal)| {
            PortEvents {
                port_error,
                device_fatal,
            }
        });
    let all = [none, port_error, device_fatal];
    let shown = |answer| all.map(|events| events.show_loss(answer));
    assert_eq!(shown(None), [false, true, true]);
    assert_eq!(shown(Some(true)), [false, false, true]);
    assert_eq!(shown(Some(false)), [true, true, true]);
}

#[test]
fn a_change_of_addresses_is_looked_up_without_a_pause_and_an_event_tells_nothing() {
    let gid = |gid_index| SourceGid {
        gid: [7; 16],
        gid_index,
    };
    let answer = |gids: &[SourceGid]| {
        Some(PortAnswer {
            is_active: true,
            gids: gids.to_vec(),
        })
    };
    let mut device = Device::new((), None);
    let mut now = Instant::default();
    let mut ask = |device: &mut Device<()>| {
        now += Duration::from_millis(1);
        device.poll(None, now)
    };
    assert_eq!(ask(&mut device), Some(Step::AskPort(())));
    // The table changes after the device has read it, and before the answer arrives.
    device.event(Event::GidChange);
    device.answered(Ok(()), None);
    device.port_answered(answer(&[gid(3)]));
    assert!(device.has_gid(&gid(3)) && !device.has_gid(&gid(4)));
    assert_eq!(ask(&mut device), Some(Step::AskPort(())));
    device.answered(Ok(()), None);
    device.port_answered(answer(&[]));
    assert!(!device.has_gid(&gid(3)));
    assert_eq!(
        ask(&mut device),
        None,
        "a loss concerns queue pairs, not the port"
    );
    device.event(Event::GidChange);
    assert_eq!(ask(&mut device), Some(Step::AskPort(())));
    device.answered(Ok(()), None);
    device.port_answered(answer(&[gid(4)]));
    assert_eq!(ask(&mut device), Some(Step::Tell(PortChange::Up)));
    assert!(device.has_gid(&gid(4)) && !device.has_gid(&gid(3)));
}

#[test]
fn the_fatal_event_of_a_device_without_an_entry_proves_its_removal() {
    for (entry, presence) in [(None, Presence::Gone), (Some(7), Presence::CutOff)] {
        let mut device = Device::new((), entry);
        device.event(Event::DeviceFatal);
        assert_eq!(device.presence(), Presence::Here, "it may only have failed");
        device.call_failed(DeviceError::CutOff, 0);
        device.event(Event::DeviceFatal);
        assert_eq!(device.presence(), presence);
    }
}

#[test]
fn an_answer_after_a_later_error_shows_nothing() {
    let mut device = Device::new((), Some(7));
    device.ask(Instant::default()).unwrap();
    device.call_failed(DeviceError::CutOff, 0);
    device.answered(Ok(()), Some(7));
    assert_eq!(device.presence(), Presence::CutOff);
    device.ask(Instant::default()).unwrap();
    device.answered(Ok(()), Some(7));
    assert_eq!(
        (device.presence(), device.absence()),
        (Presence::Here, Absence::Silent)
    );
}

#[test]
fn failures_to_return_double_the_pause() {
    let mut device = Device::new((), Some(7));
    device.call_failed(DeviceError::CutOff, 0);
    device.ask(Instant::default()).unwrap();
    device.answered(Err(Some(DeviceError::CutOff)), None);
    let mut now = Instant::default();
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let begun = now;
        while device.begin_return(now).is_none() {
            now += SEARCH_EVERY;
            assert!(now - begun < 100 * SEARCH_EVERY, "no attempt begins");
        }
        device.reopened((), Some(8));
        assert!(!device.end_return(Returned::NotRegistered));
        pauses.push((now - begun).as_millis());
    }
    assert_eq!(
        pauses,
        [0, 1000, 2000, 4000, 8000, 16_000, 32_000, 32_000, 32_000]
    );
}

#[test]
fn an_attempt_that_began_before_a_silence_does_not_end_it() {
    let mut device = Device::new((), Some(7));
    let mut now = Instant::default();
    let mut fall_silent_and_answer = |device: &mut Device<()>| {
        device.ask(now).unwrap();
        now += PATIENCE;
        assert_eq!(device.check_patience(now), Some(PATIENCE));
        device.answered(Ok(()), Some(7));
        now
    };
    let now = fall_silent_and_answer(&mut device);
    assert_eq!(device.begin_return(now), Some(Return::Resume));
    // Memory that is registered during this silence is missing in the attempt.
    let now = fall_silent_and_answer(&mut device);
    assert!(!device.end_return(Returned::Registered));
    assert_eq!(device.opened(), Err(Absence::Silent));
    assert_eq!(device.begin_return(now), Some(Return::Resume));
    assert!(device.end_return(Returned::Registered) && device.opened().is_ok());
}
