//! Simulates the TCP of one plugin connection in virtual time. The network can break and return, a
//! middlebox can close the TCP connection, and the sender redials as its service thread does.

use super::Dice;
use nccl_net_spark::comm::recovery::driver::Driver;
use proto::flow::redial::{Attempts, Step};
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use std::collections::VecDeque;

enum Network {
    Carries,
    /// Carries until `at_ns`, and again from `back_ns` on. If `back_ns` is `None`, the network
    /// never returns.
    Breaks {
        at_ns: u64,
        back_ns: Option<u64>,
    },
    /// Carries nothing before `back_ns`. If `back_ns` is `None`, the network never returns.
    Down {
        back_ns: Option<u64>,
    },
}

/// A packet under way, with the attempt whose TCP connection carries it.
struct Packet {
    due_ns: u64,
    attempt: u64,
    item: Item,
}

enum Item {
    Frame(ControlFrame),
    Redial,
    Resumed,
}

/// State of a side's TCP connection, as the side's service thread sees it. The numbers are those of
/// the attempts that made the connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TcpState {
    Open(u64),
    /// This side accepted the connection in place of an older one, and no control frame has arrived
    /// on it yet.
    New(u64),
    GivenUp,
}

impl TcpState {
    fn attempt(self) -> Option<u64> {
        match self {
            Self::Open(attempt) | Self::New(attempt) => Some(attempt),
            Self::GivenUp => None,
        }
    }
}

/// A failure of a side's TCP connection, which the side notices at `at_ns`.
#[derive(Clone, Copy)]
struct Notice {
    at_ns: u64,
    /// The attempt that made the connection. The notice is ignored if the side uses another
    /// connection at `at_ns`.
    attempt: u64,
    /// True if the other end is closed, possibly with its process; false if the network is down.
    is_closed: bool,
}

/// The TCP connections of one plugin connection. Each is identified by the number of the attempt
/// that made it; the first one has number 0.
pub struct Tcp {
    network: Network,
    /// Packets to the sender, then packets to the receiver.
    packets: [VecDeque<Packet>; 2],
    states: [TcpState; 2],
    notices: [Option<Notice>; 2],
    /// First attempt whose connection may be alive. Connections of older attempts are dead.
    first_alive: u64,
    attempts: Attempts,
    last_attempt: u64,
    breaks_left: u64,
    dice: Dice,
    closings_left: u64,
    /// Random numbers for the closings, which were added to this simulation later. They take none
    /// from `dice`, which yields the same numbers as before for an old seed.
    closing_dice: Dice,
}

impl Tcp {
    /// Creates a TCP. Its network breaks at `breaks_ns`, if that is given; otherwise `seed` decides
    /// if and when the network breaks. `seed` also decides whether the network returns.
    pub fn new(breaks_ns: Option<u64>, now_ns: u64, seed: u64) -> Self {
        let mut dice = Dice::new(seed.rotate_left(17));
        let returns = dice.one_in(2);
        let breaks_ns = breaks_ns
            .or_else(|| (returns && dice.one_in(2)).then(|| now_ns + dice.below(2_000_000)));
        let network = breaks_ns.map_or(Network::Carries, |at_ns| Network::Breaks {
            at_ns,
            back_ns: returns.then(|| at_ns + dice.below(3_000_000_000)),
        });
        let breaks_left = dice.below(3);
        let mut closing_dice = Dice::new(seed.rotate_left(29));
        let closings_left = closing_dice.below(4);
        Self {
            network,
            packets: Default::default(),
            states: [TcpState::Open(0); 2],
            notices: Default::default(),
            first_alive: Default::default(),
            attempts: Default::default(),
            last_attempt: Default::default(),
            breaks_left,
            dice,
            closings_left,
            closing_dice,
        }
    }

    /// True if the network breaks permanently. Then a rail has to carry the control frames.
    pub fn breaks_permanently(&self) -> bool {
        matches!(
            self.network,
            Network::Breaks { back_ns: None, .. } | Network::Down { back_ns: None }
        )
    }

    /// Sometimes closes TCP under both sides, like a middlebox, and then returns true. After such a
    /// close, each side considers the other dead unless a frame arrives within two seconds.
    pub fn maybe_close(&mut self, now_ns: u64) -> bool {
        let Network::Carries = self.network else {
            return false;
        };
        if self.closings_left == 0 || !self.closing_dice.one_in(32) {
            return false;
        }
        let Some(attempt) = self.states[0]
            .attempt()
            .filter(|attempt| self.states[1].attempt() == Some(*attempt))
        else {
            return false;
        };
        self.closings_left -= 1;
        self.first_alive = attempt + 1;
        for side in [0, 1] {
            self.packets[side].retain(|packet| packet.attempt != attempt);
            // One side may notice much later than the other: when it sends, or by its keepalive.
            let most_ns = if self.closing_dice.one_in(4) {
                1_000_000_000
            } else {
                2_000_000
            };
            let at_ns = now_ns + self.closing_dice.below(most_ns);
            self.note(side, attempt, at_ns, true);
        }
        true
    }

    /// Does what the service thread does before it runs the driver: delivers frames and notices,
    /// and dials. Sometimes delivers a frame twice.
    pub fn poll(
        &mut self,
        side: usize,
        driver: &mut Driver,
        now_ns: u64,
        now: Instant,
        dice: &mut Dice,
    ) {
        self.advance_network(now_ns);
        while self.packets[side]
            .front()
            .is_some_and(|packet| packet.due_ns <= now_ns)
        {
            let Some(Packet { attempt, item, .. }) = self.packets[side].pop_front() else {
                break;
            };
            match item {
                Item::Frame(frame) if self.states[side].attempt() == Some(attempt) => {
                    driver.receive_frame(&frame, now);
                    if dice.one_in(16) {
                        driver.receive_frame(&frame, now);
                    }
                    self.states[side] = TcpState::Open(attempt);
                    driver.tcp_confirmed(now);
                }
                // The frame is from a connection that this side has replaced.
                Item::Frame(_) => {}
                Item::Redial => self.replace(attempt, driver, now_ns),
                Item::Resumed => {
                    self.attempts.succeeded(now_ns);
                    self.states[0] = TcpState::Open(attempt);
                    driver.tcp_opened();
                    driver.tcp_confirmed(now);
                }
            }
        }
        self.handle_notice(side, driver, now_ns, now);
        let is_unreachable =
            side == 0 && !self.breaks_permanently() && self.dial(driver, now_ns, now);
        if self.states[side] == TcpState::GivenUp {
            driver.tcp_missing(is_unreachable, now);
        }
    }

    /// Replaces the accepting side's connection by the redialled one, and closes the old one.
    fn replace(&mut self, attempt: u64, driver: &mut Driver, now_ns: u64) {
        if let Some(old) = self.states[1]
            .attempt()
            .filter(|old| *old >= self.first_alive)
        {
            self.note(0, old, now_ns, true);
        }
        self.states[1] = TcpState::New(attempt);
        self.post(0, attempt, Item::Resumed, now_ns);
        driver.tcp_opened();
    }

    fn handle_notice(&mut self, side: usize, driver: &mut Driver, now_ns: u64, now: Instant) {
        let Some(Notice {
            attempt, is_closed, ..
        }) = self.notices[side].take_if(|notice| notice.at_ns <= now_ns)
        else {
            return;
        };
        match (self.states[side], is_closed) {
            (state, _) if state.attempt() != Some(attempt) => return,
            (_, false) => driver.tcp_failed("the network is down", now),
            (TcpState::New(_), true) if !driver.has_rail() => {
                driver.tcp_failed("closed immediately", now)
            }
            (_, true) => driver.tcp_closed_by_peer(now),
        }
        self.states[side] = TcpState::GivenUp;
    }

    fn note(&mut self, side: usize, attempt: u64, at_ns: u64, is_closed: bool) {
        self.notices[side] = Some(Notice {
            at_ns,
            attempt,
            is_closed,
        });
    }

    /// Sends a frame. Returns false if the connection did not accept it.
    pub fn send(&mut self, side: usize, frame: ControlFrame, now_ns: u64, dice: &mut Dice) -> bool {
        let Some(attempt) = self.states[side].attempt() else {
            return false;
        };
        if attempt >= self.first_alive {
            let delay_ns = dice.below(100_000);
            self.post(1 - side, attempt, Item::Frame(frame), now_ns + delay_ns);
            return true;
        }
        // The side has not noticed yet that its connection is dead: the kernel may accept the
        // frame.
        dice.one_in(2)
    }

    fn post(&mut self, to: usize, attempt: u64, item: Item, due_ns: u64) {
        let not_before = self.packets[to].back().map_or(0, |packet| packet.due_ns);
        self.packets[to].push_back(Packet {
            due_ns: due_ns.max(not_before),
            attempt,
            item,
        });
    }

    /// Dials if the driver needs a TCP connection. Returns true if an attempt has failed.
    fn dial(&mut self, driver: &mut Driver, now_ns: u64, now: Instant) -> bool {
        let need = driver.tcp_need(self.states[0] != TcpState::GivenUp, now);
        match self.attempts.poll(need, now_ns) {
            Some(Step::Dial(attempt)) => {
                self.last_attempt = attempt;
                match self.network {
                    // Half of the attempts are refused. The others get no answer.
                    Network::Down { .. } if self.dice.one_in(2) => {
                        self.attempts.failed(now_ns);
                        return true;
                    }
                    Network::Down { .. } => {}
                    Network::Carries | Network::Breaks { .. } => {
                        let delay_ns = self.dice.below(1_000_000);
                        self.post(1, attempt, Item::Redial, now_ns + delay_ns);
                    }
                }
            }
            // Closes the dialled connection, and so the other side's end.
            Some(Step::Abandon) => {
                self.packets[0].retain(|packet| packet.attempt != self.last_attempt);
                if self.states[1].attempt() == Some(self.last_attempt) {
                    self.note(1, self.last_attempt, now_ns, true);
                }
                return true;
            }
            None => {}
        }
        false
    }

    fn advance_network(&mut self, now_ns: u64) {
        match self.network {
            Network::Breaks { at_ns, back_ns } if at_ns <= now_ns => {
                self.network = Network::Down { back_ns };
                self.packets = Default::default();
                self.first_alive = self.last_attempt + 1;
                // If the network never returns, there is no notice: the driver notices that frames
                // are not accepted.
                let notices = |dice: &mut Dice| {
                    // The kernel's keepalive notices a silent peer after 15 s; here it takes less.
                    let most_ns = if dice.one_in(3) {
                        8_000_000_000
                    } else {
                        1_000_000_000
                    };
                    back_ns.map(|_| now_ns + dice.below(most_ns))
                };
                for side in [0, 1] {
                    if let (Some(at_ns), Some(attempt)) =
                        (notices(&mut self.dice), self.states[side].attempt())
                    {
                        self.note(side, attempt, at_ns, false);
                    }
                }
            }
            Network::Down {
                back_ns: Some(back_ns),
            } if back_ns <= now_ns => {
                self.network = Network::Carries;
                if self.breaks_left > 0 {
                    self.breaks_left -= 1;
                    let at_ns = now_ns + self.dice.below(1_000_000_000);
                    self.network = Network::Breaks {
                        at_ns,
                        back_ns: Some(at_ns + self.dice.below(3_000_000_000)),
                    };
                }
            }
            _ => {}
        }
    }
}
