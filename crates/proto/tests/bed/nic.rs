//! A model of a NIC and of Linux, as a process sees them: one device name, under which devices come
//! and go.

use proto::device::{DeviceError, Event, PortAnswer, SourceGid};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Works,
    /// The firmware has failed. The NIC may still access memory.
    Failed,
    /// The kernel has cut programs off. The NIC may still access memory.
    CutOff,
}

/// One device name. The inode of its entry in sysfs, and the program's handle, are the generation
/// of the device.
#[derive(Debug)]
pub struct Nic {
    /// Generation and phase of the device that has the name now.
    pub present: Option<(u32, Phase)>,
    next_generation: u32,
    /// True while the firmware answers no command. Data still flows.
    pub is_silent: bool,
    pub is_port_active: bool,
    /// Index of the port's address in the GID table.
    pub gid_index: Option<u16>,
    next_gid_index: u16,
    /// Events that the program has not read, each with the generation of its device.
    events: Vec<(u32, Event)>,
}

impl Nic {
    pub fn new() -> Self {
        Self {
            present: Some((0, Phase::Works)),
            next_generation: 1,
            is_silent: false,
            is_port_active: true,
            gid_index: Some(0),
            next_gid_index: 1,
            events: Vec::new(),
        }
    }

    pub fn entry(&self) -> Option<u64> {
        self.present.map(|(generation, _)| u64::from(generation))
    }

    /// Returns the outcome of a call into the device of this generation.
    pub fn outcome(&self, generation: u32) -> Result<(), DeviceError> {
        match self.present {
            Some((present, Phase::Works)) if present == generation => Ok(()),
            Some((present, Phase::Failed)) if present == generation => Err(DeviceError::Failed),
            _ => Err(DeviceError::CutOff),
        }
    }

    /// Returns true if the device of this generation may still access memory on behalf of objects
    /// that the program has not destroyed.
    pub fn may_access_memory(&self, generation: u32) -> bool {
        self.present
            .is_some_and(|(present, _)| present == generation)
    }

    /// The firmware fails, or the kernel cuts programs off.
    pub fn end(&mut self, phase: Phase) {
        if let Some((generation, present)) = &mut self.present
            && *present != Phase::CutOff
        {
            *present = phase;
            self.events.push((*generation, Event::DeviceFatal));
        }
    }

    /// The kernel has destroyed the objects of a device that was cut off, and its entry leaves.
    pub fn leave(&mut self) {
        if matches!(self.present, Some((_, Phase::CutOff))) {
            self.present = None;
        }
    }

    pub fn appear(&mut self) {
        if self.present.is_none() {
            self.present = Some((self.next_generation, Phase::Works));
            self.next_generation += 1;
        }
    }

    pub fn set_port(&mut self, is_active: bool) {
        self.is_port_active = is_active;
        let event = if is_active {
            Event::PortActive
        } else {
            Event::PortError
        };
        self.events
            .extend(self.present.map(|(generation, _)| (generation, event)));
    }

    /// The interface loses its address, or gets it at another index of the GID table.
    pub fn set_address(&mut self, is_there: bool) {
        if self.gid_index.is_some() == is_there {
            return;
        }
        self.gid_index = is_there.then_some(self.next_gid_index);
        self.next_gid_index += u16::from(is_there);
        let changed = |(generation, _)| (generation, Event::GidChange);
        self.events.extend(self.present.map(changed));
    }

    pub fn gids(&self) -> Vec<SourceGid> {
        self.gid_index.map(source).into_iter().collect()
    }

    pub fn port_answer(&self) -> PortAnswer {
        PortAnswer {
            is_active: self.is_port_active,
            gids: self.gids(),
        }
    }

    /// Takes the oldest event, if the program reads events of that device (`source`).
    pub fn take_event(&mut self, source: Option<u32>) -> Option<Event> {
        while !self.events.is_empty() {
            let (generation, event) = self.events.remove(0);
            if source == Some(generation) {
                return Some(event);
            }
        }
        None
    }

    /// Moves towards a device that works.
    pub fn mend(&mut self) {
        self.is_silent = false;
        self.set_address(true);
        match self.present {
            Some((_, Phase::Works)) if self.is_port_active => {}
            Some((_, Phase::Works)) => self.set_port(true),
            Some((_, Phase::Failed)) => self.end(Phase::CutOff),
            Some((_, Phase::CutOff)) => self.leave(),
            None => self.appear(),
        }
    }
}

/// The port's only address, at an index of the GID table.
pub fn source(gid_index: u16) -> SourceGid {
    SourceGid {
        gid: [7; 16],
        gid_index,
    }
}
