//! perftest over the fabric, as distributions package it. LD_PRELOAD loads the library beside
//! rdma-core's. Without perftest the tests are skipped with a message.

#[path = "../../tests/common/skip.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod skip;

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

#[test]
fn ib_write_bw_runs() {
    both_ends("ib_write_bw", &["-n", "200"]);
}

#[test]
fn ib_write_bw_runs_both_ways_on_several_queue_pairs() {
    both_ends("ib_write_bw", &["-n", "200", "-q", "4", "-b"]);
}

#[test]
fn ib_send_bw_runs() {
    both_ends("ib_send_bw", &["-n", "200"]);
}

#[test]
fn ib_read_bw_runs() {
    both_ends("ib_read_bw", &["-n", "200"]);
}

#[test]
fn ib_write_lat_runs() {
    both_ends("ib_write_lat", &["-n", "100"]);
}

/// With events (`ibv_get_cq_event`): perftest sleeps until the queue announces a completion.
#[test]
fn ib_send_bw_runs_by_events() {
    both_ends("ib_send_bw", &["-n", "100", "-e"]);
}

fn both_ends(tool: &str, arguments: &[&str]) {
    if Command::new(tool)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_err()
    {
        return skip::missing(&format!("{tool} is not installed (perftest)"));
    }
    let port = free_port();
    let fabric = format!("perftest-{port}");
    let server = start(tool, &fabric, 0, port, arguments);
    let server = wait_until_listening(server, port);
    let client = start(
        tool,
        &fabric,
        1,
        port,
        &[arguments, &["127.0.0.1"]].concat(),
    );
    for (end, program) in [("client", client), ("server", server)] {
        let output = program.wait_with_output().unwrap();
        let text = text(&output);
        assert!(
            output.status.success(),
            "{tool}'s {end}: {}\n{text}",
            output.status
        );
        assert!(
            end == "server" || has_a_result(&text),
            "{tool} printed no result:\n{text}"
        );
    }
    std::fs::remove_dir_all(dir().join(fabric)).unwrap();
}

fn start(tool: &str, fabric: &str, node: usize, port: u16, arguments: &[&str]) -> Child {
    std::fs::create_dir_all(dir()).unwrap();
    Command::new(tool)
        .args(["-d", "rocep1s0f0", "-x", "1", "-p", &port.to_string()])
        .args(arguments)
        .env("LD_PRELOAD", env!("CARGO_BIN_EXE_softverbs-ibverbs"))
        .env("SOFTVERBS_DIR", dir())
        .env("SOFTVERBS_FABRIC", fabric)
        .env("SOFTVERBS_NODE", node.to_string())
        .env("SOFTVERBS_PROFILE", "unpaced")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("perftest")
}

fn free_port() -> u16 {
    std::net::TcpListener::bind(("0.0.0.0", 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// Waits until the kernel's table of sockets shows the listening server. A test connection would be
/// wrong here: the server accepts only one connection, and the client tries to connect only once.
fn wait_until_listening(mut server: Child, port: u16) -> Child {
    let own = format!(":{port:04X}");
    let listens = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next().is_some_and(|address| address.ends_with(&own)) && fields.nth(1) == Some("0A")
    };
    loop {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
            .map(|table| std::fs::read_to_string(table).unwrap_or_default());
        if tables.iter().flat_map(|table| table.lines()).any(listens) {
            return server;
        }
        if server.try_wait().unwrap().is_some() {
            panic!(
                "the server ended:\n{}",
                text(&server.wait_with_output().unwrap())
            );
        }
        std::thread::yield_now();
    }
}

/// True if there is a row of figures: bytes, iterations, and the measurement.
fn has_a_result(text: &str) -> bool {
    text.lines().any(|line| {
        let figures: Vec<f64> = line
            .split_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        figures.len() >= 4 && figures[0] >= 1.0
    })
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
