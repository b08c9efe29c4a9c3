//! A network between the two ends of a connection's TCP, which can fail in several ways.

use crate::attack::{HEADER_BYTES, decoded, read_frame};
use proto::wire::handle::{HANDLE_BYTES, Handle};
use proto::wire::message::{Go, Message, RedialAt};
use socket2::SockRef;
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the network does with new connections: it forwards them, resets them, or accepts them and
/// never answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Carries,
    Resets,
    Silent,
}

/// Forwards the frames of a handshake, of the connection after it, and of later redials.
pub struct Network(Arc<Shared>);

struct Shared {
    mode: Mutex<Mode>,
    live: Mutex<Vec<Arc<Carried>>>,
    /// Address of the accepting side's listener for redialling peers, and the token for it. `None`
    /// until GO, the handshake's last message, has passed.
    redial: Mutex<Option<(SocketAddr, RedialAt)>>,
    resumed: AtomicUsize,
    last_redial: Mutex<Vec<u8>>,
}

struct Carried {
    ends: [TcpStream; 2],
    is_silent: AtomicBool,
}

impl Network {
    /// Creates a network, and a handle that leads through the network to the listener of `handle`.
    pub fn new(handle: [u8; HANDLE_BYTES]) -> (Self, [u8; HANDLE_BYTES]) {
        let real = Handle::decode(&handle).unwrap();
        let shared = Arc::new(Shared {
            mode: Mutex::new(Mode::Carries),
            live: Mutex::default(),
            redial: Mutex::default(),
            resumed: AtomicUsize::new(0),
            last_redial: Mutex::default(),
        });
        let address = serve(&shared, move |_| Some(real.address));
        (Self(shared), Handle { address, ..real }.encode())
    }

    pub fn set(&self, mode: Mode) {
        *self.0.mode.lock().unwrap() = mode;
    }

    pub fn cut(&self) {
        for carried in self.0.live.lock().unwrap().drain(..) {
            carried
                .ends
                .iter()
                .for_each(|end| _ = end.shutdown(Shutdown::Both));
        }
    }

    /// Discards all later bytes of the present connections. Neither end is notified.
    pub fn silence(&self) {
        self.0
            .live
            .lock()
            .unwrap()
            .iter()
            .for_each(|carried| carried.is_silent.store(true, Ordering::Release));
    }

    /// Number of times that the accepting side has switched to another TCP connection.
    pub fn resumed(&self) -> usize {
        self.0.resumed.load(Ordering::Acquire)
    }

    pub fn redial_at(&self) -> Option<(SocketAddr, RedialAt)> {
        *self.0.redial.lock().unwrap()
    }

    pub fn last_redial(&self) -> Vec<u8> {
        self.0.last_redial.lock().unwrap().clone()
    }
}

/// Accepts connections, and forwards each to the address that `target` returns.
fn serve(
    shared: &Arc<Shared>,
    target: impl Fn(&Shared) -> Option<SocketAddr> + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        while let Ok((stream, _)) = listener.accept() {
            let mode = *shared.mode.lock().unwrap();
            match (mode, target(&shared)) {
                (Mode::Carries, Some(target)) => carry(&shared, stream, target),
                (Mode::Silent, _) => kept.push(stream),
                (Mode::Resets, _) | (_, None) => SockRef::from(&stream)
                    .set_linger(Some(Duration::ZERO))
                    .unwrap(),
            }
        }
    });
    address
}

fn carry(shared: &Arc<Shared>, stream: TcpStream, target: SocketAddr) {
    // If nothing listens at `target`, this drops `stream`: the redialling side finds its connection
    // closed.
    let Ok(there) = TcpStream::connect(target) else {
        return;
    };
    let ends = [stream, there];
    ends[0].set_nodelay(true).unwrap();
    let carried = Arc::new(Carried {
        ends,
        is_silent: AtomicBool::new(false),
    });
    shared.live.lock().unwrap().push(Arc::clone(&carried));
    for side in [0, 1] {
        let shared = Arc::clone(shared);
        let carried = Arc::clone(&carried);
        std::thread::spawn(move || {
            let mut from = carried.ends[side].try_clone().unwrap();
            let mut to = carried.ends[1 - side].try_clone().unwrap();
            while let Some(frame) = read_frame(&mut from) {
                if carried.is_silent.load(Ordering::Acquire) {
                    continue;
                }
                if to.write_all(&seen(&shared, &carried, frame)).is_err() {
                    break;
                }
            }
            if !carried.is_silent.load(Ordering::Acquire) {
                _ = to.shutdown(Shutdown::Both);
            }
        });
    }
}

/// Inspects a frame, and returns the frame to forward. In a GO, it replaces the port for redials by
/// a port of this network, so that redials pass through the network, too.
fn seen(shared: &Arc<Shared>, carried: &Carried, frame: Vec<u8>) -> Vec<u8> {
    match frame[2] {
        5 => {
            let Message::Go(Go {
                mailbox_addr,
                pairs,
                redial: Some(at),
            }) = decoded(&frame)
            else {
                panic!("GO without a port to dial again");
            };
            let mut address = carried.ends[1].peer_addr().unwrap();
            address.set_port(at.port.get());
            *shared.redial.lock().unwrap() = Some((address, at));
            let port = serve(shared, |shared| {
                shared.redial.lock().unwrap().map(|(address, _)| address)
            })
            .port();
            let redial = Some(RedialAt {
                port: NonZeroU16::new(port).unwrap(),
                token: at.token,
            });
            Message::Go(Go {
                mailbox_addr,
                pairs,
                redial,
            })
            .encode()
        }
        7 => {
            assert!(frame.len() > HEADER_BYTES);
            shared.last_redial.lock().unwrap().clone_from(&frame);
            frame
        }
        8 => {
            shared.resumed.fetch_add(1, Ordering::AcqRel);
            frame
        }
        _ => frame,
    }
}
