//! A device against a model of Linux and a NIC, through random orders of events.

#[path = "bed/nic.rs"]
mod nic;

use nic::{Nic, Phase, source};
use proptest::prelude::*;
use proto::device::{
    Device, DeviceError, PATIENCE, PortAnswer, PortChange, Presence, Return, Returned, Step,
};
use proto::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const MILLISECOND: Duration = Duration::from_millis(1);

/// The next event. A number chooses among several things of the same kind.
#[derive(Debug, Clone, Copy)]
enum Happening {
    /// The kernel cuts programs off.
    CutOff,
    /// The firmware fails.
    Fails,
    /// The device is silent from now on, or answers again.
    Silence(bool),
    /// The kernel has destroyed all objects, and the entry leaves sysfs.
    Leaves,
    /// A new device of the same name appears.
    Appears,
    /// The oldest event that the program has not read is read.
    EventIsRead,
    /// A call on a queue pair of the program fails if the device is cut off or has failed.
    Call,
    /// A call fails although the device works, for example a control command during a reset. True
    /// for a call on an object of an earlier device.
    StrayError(DeviceError, bool),
    /// The device refuses questions from now on, or no longer.
    Refusal(bool),
    /// The application registers more memory. True if a device that is not in use refuses it.
    NewMemory(bool),
    /// The port goes down or comes up.
    Port(bool),
    /// The port loses its address, or gets it at another index.
    Address(bool),
    /// The device answers the question under way, or an earlier answer reaches the program.
    Answer,
    /// A connection finds the port usable, and wants the device if it is idle.
    Use,
    /// The attempt to bring the device back continues. Registering memory fails if false.
    ReturnGoesOn(bool),
    /// The service thread's round, after this time in milliseconds. True if answers arrive during
    /// the round.
    Round(u32, bool),
}

fn happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    prop_oneof![
        1 => Just(CutOff),
        1 => Just(Fails),
        1 => any::<bool>().prop_map(Silence),
        2 => Just(Leaves),
        2 => Just(Appears),
        2 => Just(EventIsRead),
        2 => Just(Call),
        1 => (prop_oneof![Just(DeviceError::CutOff), Just(DeviceError::Failed)], any::<bool>())
            .prop_map(|(error, is_old)| StrayError(error, is_old)),
        1 => any::<bool>().prop_map(Refusal),
        2 => any::<bool>().prop_map(NewMemory),
        2 => any::<bool>().prop_map(Port),
        2 => any::<bool>().prop_map(Address),
        4 => Just(Answer),
        1 => Just(Use),
        4 => any::<bool>().prop_map(ReturnGoesOn),
        6 => (0..4000u32, any::<bool>()).prop_map(|(later, is_fast)| Round(later, is_fast)),
    ]
}

/// The machine, its NIC, and the program around it.
struct World {
    machine: Device<u32>,
    nic: Nic,
    now: Instant,
    refuses: bool,
    asked: Option<Asked>,
    /// The attempt to bring the device back, with the number of registrations that it knows.
    returning: Option<(Return, u32)>,
    /// Number of the application's registrations, and those that each device has.
    memory: u32,
    registered: BTreeMap<u32, BTreeSet<u32>>,
    /// True while the connections count on the device, by what they were told.
    is_trusted: bool,
    /// True while the connections were not told that the port got an address.
    is_address_news: bool,
    /// True once a connection wanted the device, or found it in use.
    is_wanted: bool,
    /// Devices that were in use, so that peers know their keys.
    used: BTreeSet<u32>,
    /// The last device in use, with its number in the machine.
    last_opened: (u32, u32),
}

/// The question under way.
#[derive(Clone)]
struct Asked {
    handle: u32,
    /// The device's answer, which has not reached the program.
    answer: Option<Result<PortAnswer, DeviceError>>,
}

impl World {
    /// The device of a late rail is not used before the first [`Happening::Use`].
    fn new(is_late: bool) -> Self {
        let nic = Nic::new();
        let mut machine = Device::new(0, Some(0));
        machine.gids_read(nic.gids());
        if is_late {
            machine.keep_idle();
        }
        Self {
            machine,
            nic,
            now: Instant::default(),
            refuses: false,
            asked: None,
            returning: None,
            memory: 0,
            registered: BTreeMap::from([(0, BTreeSet::new())]),
            is_trusted: !is_late,
            is_wanted: !is_late,
            is_address_news: false,
            used: if is_late {
                BTreeSet::new()
            } else {
                BTreeSet::from([0])
            },
            last_opened: (0, 0),
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::CutOff => self.nic.end(Phase::CutOff),
            Happening::Fails => self.nic.end(Phase::Failed),
            Happening::Silence(is_silent) => self.nic.is_silent = is_silent,
            Happening::Leaves => self.nic.leave(),
            Happening::Appears => self.nic.appear(),
            Happening::EventIsRead => {
                if let Some(event) = self.nic.take_event(self.machine.source_of_events()) {
                    self.machine.event(event);
                }
            }
            Happening::Call => {
                if let Ok((handle, generation)) = self.machine.opened()
                    && let Err(error) = self.nic.outcome(handle)
                {
                    self.machine.call_failed(error, generation);
                    assert!(self.machine.opened().is_err(), "{:?}", self.machine);
                }
            }
            Happening::StrayError(error, is_old) => self.stray_error(error, is_old),
            Happening::Refusal(refuses) => self.refuses = refuses,
            Happening::NewMemory(is_refused) => {
                match self.machine.for_memory() {
                    Some(_) if is_refused && self.machine.opened().is_err() => {
                        self.machine.registration_failed();
                    }
                    Some((handle, _)) => {
                        self.registered
                            .entry(handle)
                            .or_default()
                            .insert(self.memory);
                    }
                    None => {}
                }
                self.memory += 1;
            }
            Happening::Port(is_active) => self.nic.set_port(is_active),
            Happening::Address(is_there) => {
                self.is_address_news |= is_there && self.nic.gid_index.is_none();
                self.nic.set_address(is_there);
            }
            Happening::Answer => self.answer(),
            Happening::Use => self.is_wanted |= self.machine.use_soon(),
            Happening::ReturnGoesOn(registers) => self.go_on_returning(registers),
            Happening::Round(milliseconds, is_fast) => {
                self.round(MILLISECOND * milliseconds, is_fast);
            }
        }
        self.check();
    }

    fn stray_error(&mut self, error: DeviceError, is_old: bool) {
        let Ok((_, generation)) = self.machine.opened() else {
            return;
        };
        if !is_old {
            self.machine.call_failed(error, generation);
        } else if let Some(earlier) = generation.checked_sub(1) {
            self.machine.call_failed(error, earlier);
            assert!(
                self.machine.opened().is_ok(),
                "the error is of another device"
            );
        }
    }

    fn answer(&mut self) {
        let Some(asked) = &mut self.asked else {
            return;
        };
        let Some(answer) = asked.answer.take() else {
            let outcome = self.nic.outcome(asked.handle);
            if !self.nic.is_silent || outcome.is_err() {
                asked.answer = Some(outcome.map(|()| self.nic.port_answer()));
            }
            return;
        };
        self.asked = None;
        let answer = match answer {
            Ok(_) if self.refuses => Err(None),
            answer => answer.map_err(Some),
        };
        let outcome = answer.as_ref().map(|_| ()).map_err(|error| *error);
        self.machine.answered(outcome, self.nic.entry());
        self.machine.port_answered(answer.ok());
    }

    fn go_on_returning(&mut self, registers: bool) {
        match self.returning {
            None => {}
            Some((Return::Reopen, _)) if self.machine.for_memory().is_none() => {
                match self.nic.present {
                    Some((generation, Phase::Works)) => {
                        self.machine.reopened(generation, self.nic.entry());
                        self.returning = Some((Return::Reopen, self.memory));
                        if self.machine.for_memory().is_none() {
                            self.end_return(Returned::NotFound);
                        }
                    }
                    _ => self.end_return(Returned::NotFound),
                }
            }
            Some((_, known)) if registers => {
                if let Some((handle, _)) = self.machine.for_memory() {
                    let registered = self.registered.entry(handle).or_default();
                    registered.extend(0..known);
                }
                self.end_return(Returned::Registered);
            }
            Some(_) => {
                self.end_return(Returned::NotRegistered);
                let refuses = self.machine.for_memory();
                assert_eq!(refuses, None, "it would fail each registration");
            }
        }
    }

    fn end_return(&mut self, returned: Returned) {
        self.returning = None;
        self.machine.end_return(returned);
    }

    fn round(&mut self, later: Duration, is_fast: bool) {
        self.now += later;
        let mut steps = 0;
        while let Some(step) = self.machine.poll(self.nic.entry(), self.now) {
            steps += 1;
            assert!(steps < 10, "the round does not end: {:?}", self.machine);
            match step {
                Step::WarnStuck(waited) => assert!(waited >= PATIENCE),
                Step::Tell(PortChange::Removed) => self.is_trusted = false,
                Step::Tell(PortChange::Up) => {
                    (self.is_trusted, self.is_address_news) = (true, false);
                }
                Step::Tell(PortChange::Down) => {}
                Step::AskPort(handle) => {
                    assert!(self.asked.is_none(), "two questions at a time");
                    self.asked = Some(Asked {
                        handle,
                        answer: None,
                    });
                    if is_fast {
                        self.answer();
                        self.answer();
                    }
                }
                Step::Return(how) => {
                    assert!(self.returning.is_none(), "two returns at a time");
                    self.returning = Some((how, self.memory));
                }
            }
        }
        let is_there = self.machine.presence() == Presence::Here;
        let is_open = self.machine.opened().is_ok();
        assert!(!self.is_trusted || is_there, "{:?}", self.machine);
        assert!(!is_open || self.is_trusted, "{:?}", self.machine);
    }

    fn check(&mut self) {
        let has_memory = self.registered.values().any(|memory| !memory.is_empty());
        assert!(self.is_wanted || !has_memory, "{:?}", self.machine);
        for handle in &self.used {
            if self.nic.may_access_memory(*handle) {
                assert!(
                    self.machine.source_of_events() == Some(*handle)
                        && self.machine.presence() != Presence::Gone,
                    "device {handle} still accesses memory: {:?}",
                    self.machine
                );
            }
        }
        if let Ok((handle, generation)) = self.machine.opened() {
            assert_eq!(
                self.registered.get(&handle).map(BTreeSet::len),
                Some(self.memory as usize),
                "device {handle} is in use without registrations: {:?}",
                self.machine
            );
            let (last_handle, last) = self.last_opened;
            assert!(handle == last_handle || generation > last);
            self.last_opened = (handle, generation);
            self.used.insert(handle);
        }
    }

    /// Lets everything work from now on, for two minutes.
    fn settle(&mut self) {
        self.refuses = false;
        for _ in 0..240 {
            self.nic.mend();
            self.check();
            self.happen(Happening::EventIsRead);
            self.happen(Happening::Use);
            self.happen(Happening::Round(500, false));
            self.happen(Happening::Answer);
            self.happen(Happening::Answer);
            self.happen(Happening::ReturnGoesOn(true));
            self.happen(Happening::ReturnGoesOn(true));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// No device counts as gone while it may access memory, none is used without the memory's
    /// registrations, and each comes back into use. The machine knows the port's address, and tells
    /// of an address that came.
    #[test]
    fn a_device_is_used_while_it_is_there_and_never_else(
        is_late: bool,
        happenings in prop::collection::vec(happening(), 0..80)
    ) {
        let mut world = World::new(is_late);
        for happening in happenings {
            world.happen(happening);
        }
        world.settle();
        let opened = world.machine.opened().map(|(handle, _)| handle);
        prop_assert_eq!(opened.ok(), world.nic.present.map(|(generation, _)| generation));
        prop_assert!(world.is_trusted && !world.is_address_news);
        let indices = (0..100).filter(|index| world.machine.has_gid(&source(*index)));
        prop_assert_eq!(indices.collect::<Vec<_>>(), Vec::from_iter(world.nic.gid_index));
    }
}
