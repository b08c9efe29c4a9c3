//! Ranks that mpirun, srun and torchrun start. Most tests set a launcher's environment variables;
//! one runs mpirun itself.

mod common;

use common::skip::skip;
use common::{Fake, ProgramOutput, has_mpirun, nccl_spark};
use nix::unistd::geteuid;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};

const TOKEN: &str = "SPARK_JOB_TOKEN";

/// Runs a process for each environment, all at the same time. Returns the processes' outputs.
fn launch(
    arguments: &str,
    fake: &Fake,
    environments: &[Vec<(&str, String)>],
) -> Vec<ProgramOutput> {
    let start = |environment: &Vec<(&str, String)>| {
        let mut command = nccl_spark();
        command
            .args(arguments.split_whitespace())
            .args(["--fabric", "verbs", "--plugin"])
            .arg(fake.library());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let processes: Vec<_> = environments.iter().map(start).collect();
    processes
        .into_iter()
        .map(|process| process.wait_with_output().unwrap().into())
        .collect()
}

/// Returns a number that no other test or run has, like a launcher's job number.
fn job() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    u64::from(std::process::id()) * 1000 + count
}

/// Returns the name `localhost`, or 127.0.0.1 if the name cannot be looked up (as without
/// /etc/hosts).
fn this_machine() -> &'static str {
    let is_known = ("localhost", 0)
        .to_socket_addrs()
        .is_ok_and(|mut found| found.next().is_some());
    if is_known { "localhost" } else { "127.0.0.1" }
}

fn mpirun(ranks: usize) -> Vec<Vec<(&'static str, String)>> {
    let job = job();
    let variables = |rank: usize| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", ranks.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", ranks.to_string()),
            ("PMIX_NAMESPACE", job.to_string()),
            ("PMIX_RANK", rank.to_string()),
        ]
    };
    (0..ranks).map(variables).collect()
}

fn torchrun(ranks: usize) -> Vec<Vec<(&'static str, String)>> {
    // Rank 0 listens on the port after torchrun's, so that port must be free.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        - 1;
    let variables = |rank: usize| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("MASTER_ADDR", this_machine().to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_RUN_ID", "none".to_owned()),
        ]
    };
    (0..ranks).map(variables).collect()
}

fn srun(ranks: usize) -> Vec<Vec<(&'static str, String)>> {
    let job = job();
    let variables = |rank: usize| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", ranks.to_string()),
            ("SLURM_JOB_ID", job.to_string()),
            ("SLURM_STEP_ID", "0".to_owned()),
            ("SLURM_NNODES", "2".to_owned()),
            (
                "SLURM_JOB_NODELIST",
                format!("{},other-[1-2]", this_machine()),
            ),
        ]
    };
    (0..ranks).map(variables).collect()
}

fn assert_one_table(output: &[ProgramOutput], launcher: &str) {
    // A busy machine starts some ranks seconds after the others, which then report that they wait.
    let is_silent = |one: &ProgramOutput| {
        one.err
            .lines()
            .all(|line| line.starts_with("# rank ") && line.contains(" waits "))
    };
    assert!(
        output
            .iter()
            .all(|one| one.status == Some(0) && is_silent(one)),
        "{output:?}"
    );
    assert!(
        output[1..].iter().all(|one| one.out.is_empty()),
        "only rank 0 speaks: {output:?}"
    );
    let out = &output[0].out;
    assert!(
        out.contains(&format!("# Using ranks that {launcher} started")),
        "{out}"
    );
    assert!(out.contains("# Out of bounds values : 0 OK\n"), "{out}");
    let rows = out
        .lines()
        .filter(|line| !line.starts_with('#') && line.ends_with(" 0"))
        .count();
    assert_eq!(rows, 3, "{out}");
}

#[test]
fn every_launchers_ranks_find_each_other() {
    let fake = Fake::compile(&[]);
    for (launcher, environments) in [
        ("mpirun", mpirun(3)),
        ("torchrun", torchrun(2)),
        ("srun", srun(3)),
    ] {
        let output = launch("all-reduce -b 8 -e 8M -f 1000 -n 2", &fake, &environments);
        assert_one_table(&output, launcher);
    }
}

#[test]
fn a_given_number_of_ranks_runs_on_this_machine() {
    let fake = Fake::compile(&[]);
    let output = launch("all-gather -r 2 -b 8 -e 8", &fake, &mpirun(5)[4..]);
    assert!(
        output[0].status == Some(0) && output[0].out.contains("# Using ranks on this machine\n"),
        "{output:?}"
    );
}

#[test]
fn a_failed_rank_is_named_by_rank_0_and_all_ranks_end() {
    let fake = Fake::compile(&[]);
    for (fault, reason) in [
        (
            "FAKE_FAIL=2",
            "rank 2: channel 0: isend returned ncclRemoteError (6): NET/Fake: planted: the cable is gone",
        ),
        ("FAKE_DIE=2", " ended without an error message"),
    ] {
        let output = launch(
            &format!("sendrecv -b 64 -e 64 --rank-env 2:{fault}"),
            &fake,
            &mpirun(3),
        );
        let is_reported = output[0]
            .err
            .lines()
            .any(|line| line.starts_with("nccl-spark: rank 2: ") && line.ends_with(reason));
        assert!(
            is_reported && output[0].status == Some(1),
            "{fault}: {output:?}"
        );
        assert!(
            output[1..].iter().all(|one| one.status != Some(0)),
            "{fault}: {output:?}"
        );
    }
}

#[test]
fn ranks_that_do_not_meet_end_with_an_error() {
    let fake = Fake::compile(&[]);
    let alone = |environment: &[Vec<(&str, String)>]| {
        launch("sendrecv -b 64 -e 64 -T 1", &fake, environment)
    };
    let output = alone(&mpirun(3)[..1]);
    assert!(
        output[0].status == Some(1) && output[0].err.contains("did not connect: 1, 2;"),
        "{output:?}"
    );
    let output = alone(&mpirun(3)[1..2]);
    assert!(
        output[0].status == Some(1)
            && output[0]
                .err
                .contains("rank 1: rank 0 was not found at 127.0.0.1:"),
        "{output:?}"
    );
    let mut apart = mpirun(2);
    apart
        .iter_mut()
        .for_each(|environment| environment.retain(|(name, _)| !name.contains("LOCAL")));
    let output = alone(&apart);
    assert!(
        output
            .iter()
            .all(|one| one.status == Some(1) && one.err.contains("--rendezvous HOST:PORT")),
        "{output:?}"
    );
}

#[test]
fn a_rank_says_what_it_waits_for() {
    let fake = Fake::compile(&[]);
    let alone = |place: &str, rank: usize| {
        let arguments = format!("sendrecv -b 64 -e 64 -T 5 --rendezvous {place}");
        launch(&arguments, &fake, &mpirun(3)[rank..=rank]).remove(0)
    };
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let free = format!("127.0.0.1:{port}");
    let nowhere = "no-such-host.invalid:9";
    let (first, unresolved, quiet) = std::thread::scope(|scope| {
        let first = scope.spawn(|| alone(&free, 0));
        let unresolved = scope.spawn(|| alone(nowhere, 1));
        (
            first.join().unwrap(),
            unresolved.join().unwrap(),
            alone(&format!("{nowhere} -q"), 1),
        )
    });
    for (output, line) in [
        (
            first,
            format!("# rank 0 waits up to 5 s at {free} for ranks 1, 2\n"),
        ),
        (
            unresolved,
            format!("# rank 1 waits up to 5 s for rank 0 at {nowhere}: "),
        ),
    ] {
        let is_told_once =
            output.err.starts_with(&line) && output.err.matches(" waits up to ").count() == 1;
        assert!(output.status == Some(1) && is_told_once, "{output:?}");
    }
    assert!(
        quiet.status == Some(1) && !quiet.err.contains(" waits up to "),
        "{quiet:?}"
    );
}

/// Starts one of two ranks, with a token and as another user if given.
fn start_rank(rank: usize, place: &str, token: Option<&str>, uid: Option<u32>) -> Child {
    let mut command = nccl_spark();
    // The plugin is not loaded before the ranks have met, so any file will do.
    let program = command.get_program().to_owned();
    command.args([
        "sendrecv",
        "-b",
        "64",
        "-e",
        "64",
        "-T",
        "10",
        "--fabric",
        "verbs",
        "--rendezvous",
        place,
        "--plugin",
    ]);
    command
        .arg(program)
        .envs(mpirun(2).remove(rank))
        .env("PMIX_NAMESPACE", "meeting")
        .current_dir("/");
    command
        .env_remove(TOKEN)
        .envs(token.map(|token| (TOKEN, token)));
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[track_caller]
fn assert_one_error(rank: Child, texts: &[&str]) {
    let output: ProgramOutput = rank.wait_with_output().unwrap().into();
    let errors: Vec<&str> = output
        .err
        .lines()
        .filter(|line| !line.contains(" waits up to "))
        .collect();
    assert!(output.status == Some(1) && errors.len() == 1, "{output:?}");
    assert!(
        texts.iter().all(|text| errors[0].contains(text)),
        "{texts:?}: {output:?}"
    );
}

fn free_place() -> String {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string()
}

/// The impostor answers as earlier versions did, with a library that leaves a file behind.
#[test]
fn an_impostor_on_rank_0s_port_runs_nothing() {
    let fake = Fake::compile(&[]);
    let source = fake.folder().join("marks.c");
    let marks = fake.folder().join("marks.so");
    let mark = fake.folder().join("mark");
    let code = format!(
        "#include <fcntl.h>\n__attribute__((constructor)) static void mark(void) {{ open({:?}, O_CREAT, 0600); }}\n",
        mark.display().to_string()
    );
    std::fs::write(&source, code).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&marks)
        .arg(&source)
        .status()
        .unwrap();
    assert!(compiled.success());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let welcome = format!(
        "{{\"Welcome\":{{\"environment\":[[\"LD_PRELOAD\",\"{}\"]]}}}}\n",
        marks.display()
    );
    for token in [None, Some("0123456789abcdef0123456789abcdef")] {
        let rank = start_rank(1, &place, token, None);
        let mut stream = listener.accept().unwrap().0;
        let mut first = String::new();
        BufReader::new(stream.try_clone().unwrap())
            .read_line(&mut first)
            .unwrap();
        stream.write_all(welcome.as_bytes()).unwrap();
        let mut more = String::new();
        // The rank may have closed with unread bytes, which is an error here.
        let _ = stream.read_to_string(&mut more);
        assert!(!first.contains("host") && more.is_empty(), "{first} {more}");
        let rank_0 = format!("rank 1: rank 0 at {place} ");
        assert_one_error(rank, &[&rank_0, "sent no message of nccl-spark"]);
    }
    assert!(!mark.exists(), "the impostor's library was loaded");
}

#[test]
fn ranks_with_different_tokens_do_not_meet() {
    let tokens = [
        "0123456789abcdef0123456789abcdef",
        "0123456789abcdef0123456789abcde0",
    ];
    for theirs in [None, Some(tokens[1])] {
        let place = free_place();
        let mut first = start_rank(0, &place, Some(tokens[0]), None);
        let second = start_rank(1, &place, theirs, None);
        assert_one_error(
            second,
            &[
                "rank 1: rank 0 at ",
                "is not trusted",
                "SPARK_JOB_TOKEN must be the same",
            ],
        );
        first.kill().unwrap();
        first.wait().unwrap();
    }
}

/// Only root can start processes of other users. The other user's rank has a token, so it does not
/// check the first rank's user.
#[test]
fn without_a_token_ranks_of_another_user_are_refused() {
    const NOBODY: u32 = 65534;
    if !geteuid().is_root() {
        return skip("not root");
    }
    let token = Some("0123456789abcdef0123456789abcdef");
    for (users, text) in [
        (
            [(token, Some(NOBODY)), (None, None)],
            "belongs to user 65534, and this process to user 0: ",
        ),
        (
            [(None, None), (token, Some(NOBODY))],
            "refused this rank: the process at 127.0.0.1:",
        ),
    ] {
        let place = free_place();
        let mut first = start_rank(0, &place, users[0].0, users[0].1);
        assert_one_error(
            start_rank(1, &place, users[1].0, users[1].1),
            &[text, "SPARK_JOB_TOKEN="],
        );
        first.kill().unwrap();
        first.wait().unwrap();
    }
}

/// Returns an address of this machine that is not loopback, if the machine has one.
fn outer_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Sends nothing; the kernel chooses the address from which it would send.
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_loopback())
}

#[test]
fn beyond_loopback_ranks_need_a_token_or_the_option() {
    let Some(address) = outer_address() else {
        return skip("no network");
    };
    let port = TcpListener::bind((address, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let place = format!("{address}:{port}");
    for rank in [0, 1] {
        assert_one_error(
            start_rank(rank, &place, None, None),
            &["SPARK_JOB_TOKEN=", "--rendezvous HOST:PORT --without-token"],
        );
    }
    let fake = Fake::compile(&[]);
    let run = |more: &str, token: Option<&str>| {
        let mut environments = mpirun(2);
        let token = token.map(|token| (TOKEN, token.to_owned()));
        environments
            .iter_mut()
            .for_each(|environment| environment.extend(token.clone()));
        let arguments = format!("all-reduce -b 8 -e 8M -f 1000 -n 2 --rendezvous {place} {more}");
        assert_one_table(&launch(&arguments, &fake, &environments), "mpirun");
    };
    run("", Some("0123456789abcdef0123456789abcdef"));
    run("--without-token", None);
}

/// Needs mpirun (Debian's openmpi-bin), which CI installs.
#[test]
fn mpirun_itself_starts_ranks() {
    let arguments = ["--allow-run-as-root", "--oversubscribe", "-np", "3"];
    if !has_mpirun() {
        return;
    }
    let fake = Fake::compile(&[]);
    let run = |more: &[&str]| -> Output {
        let mut command = Command::new("mpirun");
        command
            .args(arguments)
            .arg(env!("CARGO_BIN_EXE_nccl-spark"));
        command.args([
            "alltoall", "--fabric", "verbs", "-b", "8", "-e", "8M", "-f", "1000", "-n", "2",
            "--plugin",
        ]);
        command
            .arg(fake.library())
            .args(more)
            .env_remove("NCCL_DEBUG")
            .output()
            .unwrap()
    };
    let output = [ProgramOutput::from(run(&[]))];
    assert_one_table(&output, "mpirun");
    // mpirun gives all ranks a random number, which is a token. So other addresses need no option.
    if let Some(address) = outer_address() {
        let port = TcpListener::bind((address, 0))
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let output = [ProgramOutput::from(run(&[
            "--rendezvous",
            &format!("{address}:{port}"),
        ]))];
        assert_one_table(&output, "mpirun");
    }
    let failed = ProgramOutput::from(run(&["--rank-env", "1:FAKE_FAIL=2"]));
    assert_ne!(failed.status, Some(0), "{failed:?}");
    assert!(
        failed.err.contains("nccl-spark: rank 1: channel 1: isend"),
        "{failed:?}"
    );
}
