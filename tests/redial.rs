//! TCP connections that break and are redialled, over the software fabric, with both ends in this
//! process and a breakable network in between. Every byte of the stream is compared. The tests run
//! one at a time, because they share the fabric's rails.

#![allow(unsafe_code)]

mod attack;
#[path = "failover/bed.rs"]
mod bed;
mod common;
#[path = "redial/frozen.rs"]
mod frozen;
#[path = "redial/network.rs"]
mod network;

use attack::{decoded, dial, read_frame};
use bed::{Bed, RAILS, Stream, set};
use common::comms::{Receiving, Sending};
use common::{captured_log, until};
use frozen::Frozen;
use host::error::Error;
use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::comm::channel::Channel;
use nccl_net_spark::comm::descriptors::DescriptorWarning;
use nccl_net_spark::comm::recovery::redial::RedialHandle;
use network::{Mode, Network};
use proto::wire::handle::HANDLE_BYTES;
use proto::wire::message::{Message, Redial};
use softverbs::control::Action;
use softverbs::path::PathFault;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

fn log_of_all_threads() -> &'static captured_log::CapturedLog {
    static LOG: OnceLock<captured_log::CapturedLog> = OnceLock::new();
    LOG.get_or_init(captured_log::everywhere)
}

/// Maps a listener's handle to the handle given to the connecting side.
type HandleMap<'a> = dyn FnMut([u8; HANDLE_BYTES]) -> [u8; HANDLE_BYTES] + 'a;

#[derive(Clone, Copy)]
enum Waiting {
    ToSend,
    Receive(u16),
}

/// A connection over two rails and a breakable network. It is closed at the end. Otherwise the
/// service thread would keep watching it during the next test.
struct Scene {
    bed: Bed,
    network: Network,
    stream: Stream,
}

impl Scene {
    fn new(settings: &[(&str, &str)]) -> Self {
        Self::over(|map_handle| Bed::new_with_handle(settings, map_handle))
    }

    /// Creates a scene. `connect` makes the scene's connection. It must pass the listener's handle
    /// through the given map, and connect with the result, which leads through the network.
    fn over(connect: impl FnOnce(&mut HandleMap<'_>) -> Bed) -> Self {
        log_of_all_threads();
        let mut network = None;
        let bed = connect(&mut |handle| {
            let (new, handle) = Network::new(handle);
            network = Some(new);
            handle
        });
        let mut stream = Stream::new(&bed);
        stream.run(&bed, 20);
        Self {
            bed,
            network: network.unwrap(),
            stream,
        }
    }

    fn run(&mut self, count: u64) {
        self.stream.run(&self.bed, count);
    }

    fn go_on(&mut self, ms: u64) {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(ms) {
            self.stream.step(&self.bed).unwrap();
        }
    }

    fn until(&mut self, mut is_so: impl FnMut(&Network) -> bool) {
        until(|| {
            self.stream.step(&self.bed).unwrap();
            is_so(&self.network).then_some(())
        });
    }

    fn until_resumed(&mut self, times: usize) {
        self.until(|network| network.resumed() >= times);
    }

    fn finish(&mut self) {
        until(|| self.stream.finish_step(&self.bed).unwrap().then_some(()));
    }

    /// Returns a request that nothing matches: for side 0 a send, which each [`Self::look`] tries
    /// to start, and for side 1 a receive, which has been started.
    fn post_unmatched(&self, side: usize) -> Waiting {
        let Self { bed, stream, .. } = self;
        if side == 0 {
            return Waiting::ToSend;
        }
        let part = RecvPart {
            addr: stream.to.as_ptr() as u64,
            bytes: 100,
            tag: 99,
            memory: &stream.into,
        };
        Waiting::Receive(until(|| bed.recv.irecv(&[part], false).unwrap()))
    }

    fn look(&self, waiting: Waiting) -> Result<(), Error> {
        let Self { bed, stream, .. } = self;
        match waiting {
            Waiting::ToSend => {
                let sent = bed
                    .send
                    .isend(stream.from.as_ptr() as u64, 100, 99, &stream.out)
                    .map_err(|e| *e)?;
                assert!(sent.is_none(), "nobody receives");
            }
            Waiting::Receive(receive) => {
                let is_done = bed.recv.test(receive, |_, _| {}).map_err(|e| *e)?;
                assert!(!is_done, "nobody sends");
            }
        }
        Ok(())
    }

    /// Takes down both rails, and waits until both ends have noticed the loss.
    fn lose_rails(&mut self) {
        let log = log_of_all_threads();
        log.take();
        RAILS.iter().for_each(|rail| set(rail, Action::Down));
        let mut count = 0;
        self.until(|_| {
            count += log
                .take()
                .iter()
                .filter(|(_, line)| line.contains("no rail remains"))
                .count();
            count >= 2
        });
    }
}

#[test]
fn tcp_that_was_closed_is_back_before_all_rails_are_lost() {
    let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "100")]);
    for round in 1..=3 {
        // The peer cannot be dialled for some time.
        scene.network.set(Mode::Resets);
        scene.network.cut();
        scene.go_on(700);
        scene.network.set(Mode::Carries);
        scene.until_resumed(round);
        scene.run(20);
        scene.lose_rails();
        RAILS.iter().for_each(|rail| set(rail, Action::Up));
        // This needs TCP, because each end has to report the loss of the rails to the other end.
        scene.run(50);
    }
}

#[test]
fn without_tcp_a_moment_without_any_rail_is_final() {
    let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "4")]);
    scene.network.set(Mode::Silent);
    scene.network.cut();
    scene.go_on(500);
    scene.lose_rails();
    RAILS.iter().for_each(|rail| set(rail, Action::Up));
    let error = until(|| scene.stream.step(&scene.bed).err());
    assert!(
        error
            .to_string()
            .contains(&format!(":{}", std::process::id())),
        "{error}"
    );
    assert_eq!(scene.network.resumed(), 0);
}

#[test]
fn tcp_and_all_rails_fall_silent_together_and_return() {
    let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "60")]);
    for round in 1..=2 {
        scene.run(20);
        // The open TCP connections carry nothing, and neither end is notified. Then the rails fail.
        scene.network.set(Mode::Silent);
        scene.network.silence();
        scene.lose_rails();
        scene.go_on(4000);
        scene.network.set(Mode::Carries);
        set(RAILS[round % 2], Action::Up);
        scene.run(50);
        assert!(
            scene.network.resumed() >= round,
            "TCP was not dialled again"
        );
        set(RAILS[1 - round % 2], Action::Up);
    }
}

#[test]
fn closed_tcp_without_any_rail_is_redialled_immediately() {
    let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "60")]);
    scene.lose_rails();
    scene.network.cut();
    scene.until_resumed(1);
    set(RAILS[0], Action::Up);
    scene.run(50);
}

/// Returns the log lines about lost TCP and about returned TCP.
fn tcp_lines(lines: &[(tracing::Level, String)]) -> [Vec<String>; 2] {
    ["continue over the rails", "are back after"].map(|part| {
        lines
            .iter()
            .filter(|(_, line)| line.contains(part))
            .map(|(level, line)| format!("{level} {line}"))
            .collect()
    })
}

#[test]
fn lost_tcp_is_one_line_and_its_return_is_another() {
    let log = log_of_all_threads();
    let mut first = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "100")]);
    let _turn = first.bed.turn.take();
    let hosts = first.bed.hosts.clone();
    let mut scenes = vec![first];
    (1..6).for_each(|_| {
        scenes.push(Scene::over(|map_handle| {
            Bed::with_handle(hosts.clone(), map_handle)
        }))
    });
    let name = scenes[0].bed.hosts[0].process().name.clone();
    log.take();
    // The connections break one after another. Each is redialled before the next one breaks.
    for scene in &mut scenes {
        scene.network.cut();
        scene.until_resumed(1);
        scene.go_on(300);
    }
    scenes.iter().for_each(|scene| {
        scene.network.set(Mode::Resets);
        scene.network.cut();
    });
    let mut lines = Vec::new();
    until(|| {
        lines.extend(log.take());
        (tcp_lines(&lines)[0].len() == 2).then_some(())
    });
    scenes
        .iter()
        .for_each(|scene| scene.network.set(Mode::Carries));
    scenes.iter_mut().for_each(|scene| scene.until_resumed(2));
    until(|| {
        lines.extend(log.take());
        (tcp_lines(&lines)[1].len() == 2).then_some(())
    });
    drop(scenes);
    lines.extend(log.take());
    let [lost, back] = tcp_lines(&lines);
    let continues = format!("; connections with {name} continue over the rails");
    let returned = format!("INFO bootstrap connections with {name} are back after ");
    assert!(
        lost.len() == 2
            && lost
                .iter()
                .all(|line| line.starts_with("INFO ") && line.contains(&continues)),
        "{lost:?}"
    );
    assert!(
        back.len() == 2 && back.iter().all(|line| line.starts_with(&returned)),
        "{back:?}"
    );
}

fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn dialling_without_the_token_or_late_changes_nothing() {
    let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "100")]);
    let (address, real) = scene.network.redial_at().unwrap();
    let mut close = real.token;
    close[15] ^= 1;
    let redial = |token, attempt| Message::Redial(Redial { token, attempt }).encode();
    let mut refused: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 50_000],
        redial(close, 1),
        redial([0; 16], u64::MAX),
        // Attempt numbers start at 1.
        redial(real.token, 0),
        Message::Resumed.encode(),
        Message::Refuse("no".to_owned()).encode(),
    ];
    scene.network.cut();
    scene.until_resumed(1);
    refused.push(scene.network.last_redial());
    let mut clients = Vec::new();
    for words in &refused {
        let mut client = dial(address);
        // The listener may drop the client meanwhile.
        let _ = client.write_all(words);
        clients.push(client);
    }
    let mut silent: Vec<TcpStream> = Vec::new();
    for at in 0..300 {
        let mut client = dial(address);
        let _ = client.write_all(&redial(real.token, 1 << 20)[..at % 32]);
        silent.push(client);
    }
    until(|| {
        scene.stream.step(&scene.bed).unwrap();
        clients.iter_mut().all(is_closed).then_some(())
    });
    until(|| {
        scene.stream.step(&scene.bed).unwrap();
        (silent
            .iter_mut()
            .filter_map(|client| (!is_closed(client)).then_some(()))
            .count()
            <= 64)
            .then_some(())
    });
    assert_eq!(scene.network.resumed(), 1);
    // The TCP connection that was open before these clients came is still in use. Without it the
    // next steps would fail.
    scene.lose_rails();
    RAILS.iter().for_each(|rail| set(rail, Action::Up));
    scene.run(50);
    assert_eq!(scene.network.resumed(), 1, "the connection was redialled");
    // The honest peer gets in although the silent clients crowd the port.
    scene.network.cut();
    scene.until_resumed(2);
    scene.run(20);
}

#[test]
fn a_client_that_floods_the_port_produces_one_log_line() {
    let log = log_of_all_threads();
    let scene = Scene::new(&[]);
    let address = scene.network.redial_at().unwrap().0;
    log.take();
    let words = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        Message::Resumed.encode(),
    ];
    for at in 0..40 {
        let mut client = dial(address);
        client.write_all(&words[at % 2]).unwrap();
        until(|| is_closed(&mut client).then_some(()));
    }
    let lines: Vec<_> = log
        .take()
        .into_iter()
        .filter(|(_, line)| line.contains("rejected"))
        .collect();
    assert!(
        matches!(&lines[..], [(level, _)] if *level == tracing::Level::INFO),
        "{lines:?}"
    );
}

#[test]
fn a_later_attempt_replaces_an_earlier_one() {
    let mut scene = Scene::new(&[]);
    let (address, real) = scene.network.redial_at().unwrap();
    // The test dials in place of the connecting side, as if that side had lost its TCP connection.
    // The accepting side still has an open TCP connection.
    let mut first = dial(address);
    first
        .write_all(
            &Message::Redial(Redial {
                token: real.token,
                attempt: 1,
            })
            .encode(),
        )
        .unwrap();
    assert_eq!(read_frame(&mut first).expect("an answer")[2], 8);
    // The accepting side refuses the connecting side's attempts until their numbers exceed 1.
    scene.until_resumed(1);
    until(|| {
        scene.stream.step(&scene.bed).unwrap();
        // A control frame may have to be read before the end of the stream.
        is_closed(&mut first).then_some(())
    });
    scene.run(20);
}

/// Dials in place of the scene's connecting side, which replaces the scene's TCP connection. Closes
/// the new TCP connection after the answer.
fn dial_and_close(scene: &Scene) {
    let (address, real) = scene.network.redial_at().unwrap();
    let mut given_up = dial(address);
    given_up
        .write_all(
            &Message::Redial(Redial {
                token: real.token,
                attempt: 1,
            })
            .encode(),
        )
        .unwrap();
    assert_eq!(read_frame(&mut given_up).expect("an answer")[2], 8);
}

#[test]
fn a_new_tcp_connection_that_closes_immediately_proves_nothing_about_a_peer_that_answers() {
    let mut scene = Scene::new(&[]);
    // While a rail still works, the peer can answer over it.
    dial_and_close(&scene);
    scene.until_resumed(1);
    // Each end has two seconds to show the other that it is alive. Later losses of the rails do not
    // prevent that.
    scene.go_on(2500);
    scene.run(20);
    // Without a rail, the peer can answer over another TCP connection, however late.
    scene.lose_rails();
    dial_and_close_late(&mut scene);
    scene.run(20);
}

/// Like [`dial_and_close`] without a rail. The scene's TCP connection is dead, but its connecting
/// side does not know it. The peer cannot be dialled for 4 s, longer than the time that it has for
/// an answer after a close.
fn dial_and_close_late(scene: &mut Scene) {
    let (address, real) = scene.network.redial_at().unwrap();
    let resumed = scene.network.resumed();
    scene.network.set(Mode::Silent);
    scene.network.silence();
    let mut given_up = dial(address);
    // Later than all attempts of the scene's own connecting side.
    let attempt = attempt_of(&scene.network.last_redial()) + 1;
    given_up
        .write_all(
            &Message::Redial(Redial {
                token: real.token,
                attempt,
            })
            .encode(),
        )
        .unwrap();
    assert_eq!(read_frame(&mut given_up).expect("an answer")[2], 8);
    drop(given_up);
    scene.go_on(4000);
    assert_eq!(scene.network.resumed(), resumed);
    scene.network.set(Mode::Carries);
    // A connecting side without messages to send does not know yet that its TCP connection is dead.
    // When the rails return, it has messages to send.
    RAILS.iter().for_each(|rail| set(rail, Action::Up));
    scene.until_resumed(resumed + 1);
}

fn attempt_of(frame: &[u8]) -> u64 {
    match decoded(frame) {
        Message::Redial(redial) => redial.attempt,
        other => panic!("{} in place of REDIAL", other.kind()),
    }
}

#[test]
fn an_attempt_abandoned_before_it_was_read_changes_nothing() {
    let mut scene = Scene::new(&[]);
    let frozen = Frozen::new(&scene.bed.hosts[1]);
    frozen.freeze();
    let (address, real) = scene.network.redial_at().unwrap();
    for attempt in 1..=5 {
        let mut given_up = dial(address);
        given_up
            .write_all(
                &Message::Redial(Redial {
                    token: real.token,
                    attempt,
                })
                .encode(),
            )
            .unwrap();
    }
    frozen.thaw();
    scene.lose_rails();
    RAILS.iter().for_each(|rail| set(rail, Action::Up));
    scene.run(50);
    // The first TCP connection was in use throughout. Redials are still admitted afterwards.
    assert_eq!(scene.network.resumed(), 0);
    scene.network.cut();
    scene.until_resumed(1);
}

#[test]
fn without_free_descriptors_a_warning_says_that_redials_fail() {
    let log = log_of_all_threads();
    let mut scene = Scene::new(&[]);
    common::without_files(|| {
        log.take();
        scene.network.cut();
        let mut lines = Vec::new();
        until(|| {
            lines.extend(log.take());
            lines
                .iter()
                .any(|(level, line)| {
                    let is_short = line.contains(" again: cannot connect to ")
                        && line.contains("ulimit -n is 0");
                    *level == tracing::Level::WARN
                        && line.starts_with("cannot dial 127.0.0.1:")
                        && is_short
                })
                .then_some(())
        });
    });
    scene.until_resumed(1);
    scene.run(20);
}

/// State of a peer's TCP connection when the peer dies.
#[derive(Debug, Clone, Copy)]
enum Death {
    Open,
    /// The peer has redialled and sent nothing since.
    New,
    /// The TCP connection is closed, and no redial succeeds for a long time.
    Away,
}

/// A process that ends sends nothing more, its kernel closes its TCP connections, and writes to it
/// over a rail are not acknowledged. Here its service thread is stopped instead. TCP is cut, and in
/// the state [`Death::Away`] the rails become silent. Both ends use the same rails, so the rails
/// are silent for both ends.
#[test]
fn a_dead_peer_is_detected_whatever_the_state_of_its_tcp() {
    let log = log_of_all_threads();
    for (death, side) in [
        (Death::Open, 0),
        (Death::New, 0),
        (Death::Away, 0),
        (Death::Away, 1),
    ] {
        let mut scene = Scene::new(&[("NCCL_SPARK_LOSS_TIMEOUT_S", "5")]);
        let frozen = Frozen::new(&scene.bed.hosts[side]);
        scene.finish();
        let waiting = scene.post_unmatched(1 - side);
        if matches!(death, Death::Away) {
            log.take();
            scene.network.set(Mode::Silent);
            scene.network.cut();
            // Waits until each end has answered the other, so that each considers the other alive.
            let (mut answers, is_answer) = (0, |line: &str| {
                line.contains("answers after its TCP was closed")
            });
            until(|| {
                answers += log
                    .take()
                    .iter()
                    .filter(|(_, line)| is_answer(line))
                    .count();
                (answers == 2).then_some(())
            });
        }
        frozen.freeze();
        match death {
            Death::Open => scene.network.cut(),
            Death::New => {
                dial_and_close(&scene);
                scene.network.cut();
            }
            Death::Away => RAILS
                .iter()
                .for_each(|rail| set(rail, Action::Path(PathFault::Silent, true))),
        }
        let error = until(|| scene.look(waiting).err());
        let expected = if matches!(death, Death::Away) {
            "no usable rail to"
        } else {
            "is gone"
        };
        assert!(
            error.to_string().contains(expected),
            "{death:?}, side {side}: {error}"
        );
        RAILS
            .iter()
            .for_each(|rail| set(rail, Action::Path(PathFault::Silent, false)));
    }
}

#[test]
fn the_listener_closes_with_the_last_connection_and_reopens_with_the_next() {
    let mut first = Scene::new(&[]);
    // Keeps the turn after `first` is dropped, because the later connections use the rails, too.
    let _turn = first.bed.turn.take();
    let hosts = first.bed.hosts.clone();
    let address = first.network.redial_at().unwrap().0;
    let mut second = Scene::over(|map_handle| Bed::with_handle(hosts.clone(), map_handle));
    assert_eq!(
        second.network.redial_at().unwrap().0,
        address,
        "one listener for all connections"
    );
    drop(first);
    second.network.cut();
    second.until_resumed(1);
    drop(second);
    // Dials with a time limit, because an open listener may not answer if nothing accepts.
    let refused = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    until(|| {
        TcpStream::connect_timeout(&address, Duration::from_millis(100))
            .is_err_and(refused)
            .then_some(())
    });
    let mut third = Scene::over(|map_handle| Bed::with_handle(hosts, map_handle));
    third.network.cut();
    third.until_resumed(1);
}

#[test]
fn without_a_descriptor_one_connection_cannot_redial_and_the_next_one_can() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, client) = listener.accept().unwrap();
    let channel = Channel::new(accepted, client).unwrap();
    let mut redial_handle = RedialHandle::default();
    let warning = Arc::new(DescriptorWarning::default());
    let log = captured_log::CapturedLog::default();
    let _turn = common::turn();
    let refused = common::without_files(|| {
        log.capture(|| [0, 1].map(|_| redial_handle.prepare_redial(&channel, &warning).1))
    });
    assert_eq!(refused, [None, None]);
    let warnings: Vec<_> = log
        .take()
        .into_iter()
        .filter(|(level, _)| *level == tracing::Level::WARN)
        .collect();
    assert!(
        matches!(&warnings[..], [(_, line)] if line.contains("cannot accept redials (cannot listen on 127.0.0.1:0")),
        "{warnings:?}"
    );
    let redial = redial_handle
        .prepare_redial(&channel, &warning)
        .1
        .expect("there are descriptors");
    assert!(TcpStream::connect(("127.0.0.1", redial.port.get())).is_ok());
}
