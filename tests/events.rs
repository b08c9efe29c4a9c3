//! One log line for each event, regardless of the number of affected connections (`comm/log/`).
//! Tested without connections in virtual time, and with connections over the software fabric.

mod common;

use common::captured_log::{self, CapturedLog};
use common::comms::{Receiving, Sending};
use common::until;
use host::config::Config;
use nccl_net_spark::clock;
use nccl_net_spark::comm::log::once::{Direction, LogOnce, Subject};
use nccl_net_spark::comm::log::outages::{ConnectionOutages, RailOutages, SETTLED};
use nccl_net_spark::comm::{Host, RecvComm, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::wire::ids::{LaneId, RailId};
use softverbs::control::{Action, control};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::Level;

const CONNECTIONS: usize = 5;

fn lane(number: usize) -> LaneId {
    LaneId::new(number).unwrap()
}

/// Creates `count` connections with the same peer over two rails.
fn members(outages: &Arc<RailOutages>, count: usize) -> Vec<ConnectionOutages> {
    let rails = [("a:1", "x:1"), ("b:1", "y:1")]
        .map(|(rail, peer_rail)| (rail.to_owned(), peer_rail.to_owned()));
    let one = |at: usize| {
        ConnectionOutages::new(
            outages,
            &format!("spark-2:47{at}"),
            Duration::from_secs(30),
            rails.clone().into_iter(),
        )
    };
    (0..count).map(one).collect()
}

/// Returns the warnings since the last call. All other lines must be DEBUG lines.
fn warnings(log: &CapturedLog) -> Vec<String> {
    let (warnings, rest): (Vec<_>, Vec<_>) = log
        .take()
        .into_iter()
        .partition(|(level, _)| *level == Level::WARN);
    assert!(
        rest.iter().all(|(level, _)| *level == Level::DEBUG),
        "{rest:?}"
    );
    warnings.into_iter().map(|(_, words)| words).collect()
}

#[test]
fn a_rail_lost_by_all_connections_is_one_warning_and_its_return_is_another() {
    let log = CapturedLog::default();
    let outages = Arc::<RailOutages>::default();
    let begun = clock::now();
    let at = |ms: u64| begun + Duration::from_millis(ms);
    log.capture(|| {
        let mut all = members(&outages, CONNECTIONS);
        all.iter_mut().for_each(|one| one.lost(lane(0), "local port down", "retrying in 0.5 s", at(0)));
        let lost = "rail a:1 to spark-2:470 lost: local port down (peer rail x:1); 1 of 2 rails remains; retrying in 0.5 s";
        assert_eq!(warnings(&log), [lost]);
        all.iter_mut().for_each(|one| one.lost(lane(1), "local port down", "retrying in 0.5 s", at(1000)));
        let none = "rail b:1 to spark-2:470 lost: local port down (peer rail y:1); no rail remains, connections fail in 30 s; retrying in 0.5 s";
        assert_eq!(warnings(&log), [none]);
        // All connections recover rail b:1. All but the first then recover rail a:1, and the second
        // loses it again.
        all.iter_mut().rev().for_each(|one| one.recovered(lane(1), at(2000)));
        assert_eq!(warnings(&log), ["rail b:1 to spark-2:470 recovered after 1.0 s (peer rail y:1); 1 of 2 rails in use"]);
        all[1..].iter_mut().for_each(|one| one.recovered(lane(0), at(3000)));
        all[1].lost(lane(0), "local port down", "retrying in 1.0 s", at(3100));
        assert_eq!(warnings(&log), [""; 0], "one connection is without it");
        all[..2].iter_mut().for_each(|one| one.recovered(lane(0), at(3200)));
        assert_eq!(warnings(&log), ["rail a:1 to spark-2:470 recovered after 3.2 s (peer rail x:1); 2 of 2 rails in use"]);
        // The next loss is a new outage.
        all[2].lost(lane(0), "the peer reports it lost", "the peer retries", at(9000));
        assert_eq!(warnings(&log).len(), 1);
    });
}

#[test]
fn losses_while_the_peer_may_have_ended_are_logged_only_if_it_answers() {
    let log = CapturedLog::default();
    let outages = Arc::<RailOutages>::default();
    let begun = clock::now();
    let at = |ms: u64| begun + Duration::from_millis(ms);
    log.capture(|| {
        let mut all = members(&outages, CONNECTIONS);
        let hold_back = |one: &mut ConnectionOutages, number, ms| {
            one.hold_back(lane(number), "no answer".to_owned(), "retrying in 0.5 s".to_owned(), at(ms));
        };
        for one in &mut all {
            hold_back(one, 0, 0);
            hold_back(one, 1, 100);
        }
        // The first connection recovers a rail before the peer's answer counts.
        all[0].recovered(lane(1), at(200));
        assert_eq!(warnings(&log), [""; 0]);
        all.iter_mut().for_each(ConnectionOutages::peer_answers);
        let lost = [
            "rail a:1 to spark-2:470 lost: no answer (peer rail x:1); 1 of 2 rails remains; retrying in 0.5 s",
            "rail b:1 to spark-2:471 lost: no answer (peer rail y:1); no rail remains, connections fail in 30 s; retrying in 0.5 s",
        ];
        assert_eq!(warnings(&log), lost);
        all.iter_mut().for_each(ConnectionOutages::peer_answers);
        all.iter_mut().for_each(|one| one.recovered(lane(1), at(1000)));
        assert_eq!(
            warnings(&log),
            ["rail b:1 to spark-2:471 recovered after 0.9 s (peer rail y:1); 1 of 2 rails in use"]
        );
        // The peer has ended.
        all.iter_mut().for_each(|one| hold_back(one, 1, 2000));
        all.iter_mut().for_each(ConnectionOutages::ended);
        all.iter_mut().for_each(ConnectionOutages::peer_answers);
        drop(all);
        assert_eq!(warnings(&log), [""; 0]);
    });
}

#[test]
fn rails_that_only_other_connections_lost_still_count() {
    let log = CapturedLog::default();
    let outages = Arc::<RailOutages>::default();
    let now = clock::now();
    log.capture(|| {
        let mut all = members(&outages, 2);
        all[0].lost(lane(0), "no answer", "retrying", now);
        all[1].lost(lane(1), "no answer", "retrying", now);
        let warnings = warnings(&log);
        assert!(
            warnings.len() == 2
                && warnings
                    .iter()
                    .all(|line| line.contains("1 of 2 rails remains")),
            "{warnings:?}"
        );
    });
}

#[test]
fn a_rail_that_a_connection_lacked_from_the_start_is_one_warning_when_others_lose_it() {
    let log = CapturedLog::default();
    let outages = Arc::<RailOutages>::default();
    let now = clock::now();
    log.capture(|| {
        let mut all = members(&outages, 3);
        all[0].begins_without(lane(0), false, now);
        assert_eq!(warnings(&log), [""; 0], "set-up has logged the reason");
        all[1..]
            .iter_mut()
            .for_each(|one| one.lost(lane(0), "no answer", "retrying", now));
        assert_eq!(warnings(&log).len(), 1);
        all.iter_mut()
            .for_each(|one| one.recovered(lane(0), now + Duration::from_secs(2)));
        assert_eq!(
            warnings(&log),
            ["rail a:1 to spark-2:470 recovered after 2.0 s (peer rail x:1); 2 of 2 rails in use"]
        );
    });
}

#[test]
fn a_connection_that_never_recovers_is_logged_and_hides_no_other_outage() {
    let log = CapturedLog::default();
    let outages = Arc::<RailOutages>::default();
    let begun = clock::now();
    let at = |s: u64| begun + Duration::from_secs(s);
    let settled = SETTLED.as_secs();
    log.capture(|| {
        let mut all = members(&outages, CONNECTIONS);
        all.iter_mut().for_each(|one| one.lost(lane(0), "no answer", "retrying", at(0)));
        outages.tick(at(1000));
        assert_eq!(warnings(&log).len(), 1, "no connection has recovered: no new line");
        all[1..].iter_mut().for_each(|one| one.recovered(lane(0), at(1000)));
        outages.tick(at(1000 + settled - 1));
        assert_eq!(warnings(&log), [""; 0]);
        (0..3).for_each(|_| outages.tick(at(1000 + settled)));
        let some = "rail a:1 to spark-2:470 recovered for 4 of 5 connections (peer rail x:1); 1 still retrying";
        assert_eq!(warnings(&log), [some]);
        // Set-up has logged why a connection begins without the rail.
        members(&outages, 1)[0].begins_without(lane(0), false, at(1500));
        assert_eq!(warnings(&log), [""; 0]);
        all[1..].iter_mut().for_each(|one| one.lost(lane(0), "local port down", "retrying", at(2000)));
        assert_eq!(warnings(&log).len(), 1, "a new outage");
        all[1..].iter_mut().for_each(|one| one.recovered(lane(0), at(2004)));
        assert_eq!(warnings(&log), [""; 0]);
        drop(all.remove(0));
        let over = "recovered after 4.0 s (peer rail x:1); the connections still without it are closed";
        assert!(matches!(&warnings(&log)[..], [line] if line.ends_with(over)));
        // All connections close during an outage, so no line reports its end.
        all[0].lost(lane(0), "no answer", "retrying", at(3000));
        all.clear();
        assert_eq!(warnings(&log).len(), 1);
        members(&outages, 1)[0].lost(lane(0), "no answer", "retrying", at(4000));
        assert_eq!(warnings(&log).len(), 1, "the next connections' outage is theirs");
    });
}

#[test]
fn a_state_common_to_all_connections_with_a_peer_lasts_until_the_last_is_closed() {
    let log_once = LogOnce::default();
    let now = clock::now();
    let line = || Subject::Connected("over 2 rails".to_owned());
    let rail = RailId::new(0).unwrap();
    for _ in 0..2 {
        assert!(log_once.is_first("a:1", line()));
        (0..2).for_each(|_| log_once.opened("a:1"));
        assert!(
            !log_once.is_first("a:1", line())
                && log_once.is_first("b:1", line())
                && log_once.is_first("a:1", Subject::NotUsed(rail))
        );
        log_once.closed("a:1");
        assert!(!log_once.is_first("a:1", line()), "one is open");
        log_once.closed("a:1");
        log_once.closed("b:1");
    }
    let first = |direction, after| {
        log_once.is_first_stall(
            "a:1",
            direction,
            Duration::from_secs(60),
            now + Duration::from_secs(after),
        )
    };
    assert!(
        first(Direction::Send, 0)
            && first(Direction::Receive, 0)
            && !first(Direction::Send, 59)
            && first(Direction::Send, 61)
    );
}

fn host(side: usize) -> Arc<Host> {
    let (rails, library) = common::test_rails();
    let mut variables = library;
    variables.push(("NCCL_IB_HCA".to_owned(), rails[side].clone()));
    variables.push(("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()));
    bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0
}

fn connected(hosts: &[Arc<Host>; 2]) -> (SendComm, RecvComm) {
    let (listener, mut handle) = hosts[1].listen().unwrap();
    let mut send = None;
    let mut recv = None;
    until(|| {
        send = send
            .take()
            .or_else(|| hosts[0].connect(&mut handle, None).unwrap());
        recv = recv.take().or_else(|| listener.accept().unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.unwrap(), recv.unwrap())
}

#[test]
fn a_cable_pulled_under_many_connections_is_two_warnings_on_each_host() {
    let log = captured_log::everywhere();
    let hosts = [host(0), host(1)];
    let connections: Vec<_> = (0..CONNECTIONS).map(|_| connected(&hosts)).collect();
    let lines = log.take();
    let count = |words: &str| {
        lines
            .iter()
            .filter(|(_, line)| line.starts_with("connected with") && line.ends_with(words))
            .count()
    };
    assert_eq!((count("(send)"), count("(receive)")), (1, 1), "{lines:?}");
    let set = |action| {
        let variable = |name| std::env::var(name).unwrap();
        let dir = variable("SOFTVERBS_DIR");
        control(
            Path::new(&dir),
            &variable("SOFTVERBS_FABRIC"),
            None,
            "rocep1s0f0",
            action,
        )
        .unwrap();
    };
    set(Action::Down);
    // Each host writes its first warning. Then the rail stays down for 500 ms, so that the other
    // connections lose it too. The checks below would find a second warning of the same host about
    // the loss.
    let mut lines = Vec::new();
    until(|| {
        lines.extend(warnings(&log));
        (lines.len() >= 2).then_some(())
    });
    std::thread::sleep(Duration::from_millis(500));
    set(Action::Up);
    until(|| {
        lines.extend(warnings(&log));
        (lines
            .iter()
            .filter(|line| line.contains(" recovered after "))
            .count()
            >= 2)
            .then_some(())
    });
    std::thread::sleep(Duration::from_millis(500));
    lines.extend(warnings(&log));
    let count = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
    assert_eq!(
        (
            count(" lost: "),
            count("; retrying in "),
            count("; the peer retries")
        ),
        (2, 1, 1),
        "{lines:?}"
    );
    assert_eq!(
        (count("; 2 of 2 rails in use"), lines.len()),
        (2, 4),
        "{lines:?}"
    );
    for (send, recv) in connections {
        send.close();
        recv.close();
    }
}
