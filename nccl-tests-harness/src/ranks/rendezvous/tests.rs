//! Tests of the meeting: ranks, strangers, impostors, and texts of guests.

use super::*;
use crate::ranks::line::GreetingStream;
use crate::ranks::placement::trust;
use crate::ranks::token::Token;

const LONG: Duration = Duration::from_secs(60);

fn meeting(port: u16, ranks: usize, timeout_ms: u64) -> Meeting {
    let timeout = Duration::from_millis(timeout_ms);
    Meeting {
        host: "127.0.0.1".into(),
        port,
        job: "test".into(),
        ranks,
        trust: trust(None, false),
        timeout,
    }
}

fn with_token(meeting: Meeting, token: &Token) -> Meeting {
    Meeting {
        trust: trust(Some(token.clone()), false),
        ..meeting
    }
}

fn hello(rank: usize, ranks: usize) -> Hello {
    Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        job: "test".into(),
        rank,
        ranks,
        pid: 1,
        host: "here".into(),
        machine: "m".into(),
    }
}

fn open(meeting: Meeting) -> (Rendezvous, u16) {
    let rendezvous = Rendezvous::open(meeting).unwrap();
    let port = rendezvous.arrivals.addresses().unwrap()[0].port();
    (rendezvous, port)
}

fn welcome(_: &Hello) -> Result<Welcome> {
    Ok(Welcome::default())
}

#[test]
fn ranks_come_in_any_order_and_other_clients_are_refused() {
    let (rendezvous, port) = open(meeting(0, 3, 20_000));
    let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let gathering = std::thread::spawn(move || rendezvous.gather(welcome));
    let refused = |hello: Hello, why: &str| {
        let error = join(&meeting(port, 3, 20_000), &hello)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("refused this rank") && error.contains(why),
            "{error}"
        );
    };
    refused(
        Hello {
            job: "other".into(),
            ..hello(1, 3)
        },
        "belongs to the job \"other\"",
    );
    refused(
        Hello {
            version: "0".into(),
            ..hello(1, 3)
        },
        "runs nccl-spark 0",
    );
    refused(hello(1, 4), "expects 4 ranks");
    refused(hello(3, 3), "rank 3");
    refused(hello(0, 3), "rank 0");
    join(&meeting(port, 3, 20_000), &hello(2, 3)).unwrap();
    refused(hello(2, 3), "has connected already");
    let one = join(&meeting(port, 3, 20_000), &hello(1, 3)).unwrap();
    let guests = gathering.join().unwrap().unwrap();
    assert_eq!(
        guests
            .iter()
            .map(|guest| guest.hello.rank)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    // The message after the greeting is not lost.
    let end = |line: &TcpStream| {
        GreetingStream::new(
            line.try_clone().unwrap(),
            "the other",
            Instant::now() + LONG,
        )
        .unwrap()
    };
    end(&guests[0].line).send(&"next").unwrap();
    assert_eq!(end(&one.0).receive::<String>(LONG).unwrap(), "next");
    drop(silent);
}

#[test]
fn missing_ranks_are_named() {
    let (rendezvous, port) = open(meeting(0, 3, 300));
    let waiting = std::thread::spawn(move || rendezvous.gather(welcome));
    let one = join(&meeting(port, 3, 20_000), &hello(1, 3)).unwrap();
    let error = waiting.join().unwrap().map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("did not connect: 2;") && error.contains("--rendezvous"),
        "{error}"
    );
    drop(one);
}

#[test]
fn a_rank_that_cannot_take_part_ends_the_run_and_gets_the_reason() {
    let (rendezvous, port) = open(meeting(0, 2, 20_000));
    let waiting = std::thread::spawn(move || rendezvous.gather(|_| bail!("another machine")));
    let error = join(&meeting(port, 2, 20_000), &hello(1, 2))
        .unwrap_err()
        .to_string();
    assert!(error.contains("another machine"), "{error}");
    assert!(waiting.join().unwrap().is_err());
}

#[test]
fn a_missing_rank_0_is_reported() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let error = join(&meeting(port, 2, 200), &hello(1, 2))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("127.0.0.1:{port}")) && error.contains("refused"),
        "{error}"
    );
    let (rendezvous, port) = open(meeting(0, 2, 200));
    let error = Rendezvous::open(meeting(port, 2, 200))
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("in use") && error.contains("--rendezvous"),
        "{error}"
    );
    drop(rendezvous);
}

#[test]
fn a_guest_without_the_token_or_with_another_one_takes_no_part() {
    let token = Token::new().unwrap();
    let other = Token::new().unwrap();
    let (rendezvous, port) = open(with_token(meeting(0, 2, 20_000), &token));
    let gathering = std::thread::spawn(move || rendezvous.gather(welcome));
    for stranger in [
        meeting(port, 2, 20_000),
        with_token(meeting(port, 2, 20_000), &other),
    ] {
        let error = join(&stranger, &hello(1, 2)).unwrap_err().to_string();
        assert!(
            error.contains("is not trusted: ") && error.contains("SPARK_JOB_TOKEN"),
            "{error}"
        );
    }
    // A client that ignores rank 0's proof, and has none itself.
    let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut line = GreetingStream::new(client, "rank 0", Instant::now() + LONG).unwrap();
    line.send(&serde_json::json!({ "protocol": 3, "nonce": "0".repeat(32) }))
        .unwrap();
    line.receive::<serde_json::Value>(LONG).unwrap();
    let first = serde_json::to_string(&hello(1, 2)).unwrap();
    line.send(&serde_json::json!({ "proof": "", "hello": first }))
        .unwrap();
    match line.receive(LONG).unwrap() {
        Answer::Refused { reason } => {
            assert!(reason.contains("has another token, or none"), "{reason}")
        }
        Answer::<Welcome>::Welcome(_) => panic!("admitted"),
    }
    join(&with_token(meeting(port, 2, 20_000), &token), &hello(1, 2)).unwrap();
    assert_eq!(gathering.join().unwrap().unwrap().len(), 1);
}

/// Answers the first connection as an impostor. Returns the messages that the guest sends.
fn impostor(
    answer: impl FnOnce(&serde_json::Value) -> String + Send + 'static,
) -> (u16, impl FnOnce() -> Vec<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut line =
            GreetingStream::new(stream.try_clone().unwrap(), "guest", Instant::now() + LONG)
                .unwrap();
        let first: serde_json::Value = line.receive(LONG).unwrap();
        stream
            .write_all(format!("{}\n", answer(&first)).as_bytes())
            .unwrap();
        let mut messages = vec![first];
        while let Ok(Some(next)) = line.receive_next(LONG) {
            messages.push(next);
        }
        messages.iter().map(ToString::to_string).collect()
    });
    (port, move || serving.join().unwrap())
}

#[test]
fn an_impostor_on_rank_0s_port_gets_nothing_and_starts_nothing() {
    let token = Token::new().unwrap();
    type Speech = fn(&serde_json::Value) -> String;
    let speeches: [(Speech, &str); 3] = [
        // The welcome of earlier versions.
        (
            |_| r#"{"Welcome":{"environment":[["LD_PRELOAD","/tmp/x.so"]]}}"#.into(),
            "sent no message of nccl-spark",
        ),
        (
            |_| {
                format!(
                    r#"{{"Welcome":{{"nonce":"{}","proof":""}}}}"#,
                    "0".repeat(32)
                )
            },
            "is not trusted: ",
        ),
        // The guest's own number.
        (
            |first| {
                format!(
                    r#"{{"Welcome":{{"nonce":{0},"proof":{0}}}}}"#,
                    first["nonce"]
                )
            },
            "is not trusted: ",
        ),
    ];
    for (speech, why) in speeches {
        let (port, messages) = impostor(speech);
        let error = join(&with_token(meeting(port, 2, 20_000), &token), &hello(1, 2))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("rank 0 at 127.0.0.1:{port} ")) && error.contains(why),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
        let messages = messages();
        assert!(
            messages.len() == 1 && !messages[0].contains("host"),
            "{messages:?}"
        );
    }
}

#[test]
fn a_welcome_has_no_other_fields() {
    for text in [
        r#"{"soft":null,"environment":[["LD_PRELOAD","/tmp/x.so"]]}"#,
        r#"{"soft":{"dir":"/a","fabric":"b","node":1,"library":"/tmp/x.so"}}"#,
    ] {
        assert!(
            serde_json::from_str::<Welcome>(text)
                .unwrap_err()
                .to_string()
                .contains("unknown field")
        );
    }
}

#[test]
fn a_guests_texts_do_not_reach_the_terminal_as_they_are() {
    let (rendezvous, port) = open(meeting(0, 3, 2_000));
    let gathering = std::thread::spawn(move || rendezvous.gather(welcome));
    let escape = "\u{1b}]0;owned\u{7}";
    let _one = join(
        &meeting(port, 3, 20_000),
        &Hello {
            host: escape.into(),
            ..hello(1, 3)
        },
    )
    .unwrap();
    let again = join(&meeting(port, 3, 20_000), &hello(1, 3))
        .unwrap_err()
        .to_string();
    assert!(again.ends_with("as PID 1 on ?]0;owned?"), "{again}");
    join(
        &meeting(port, 3, 20_000),
        &Hello {
            version: escape.into(),
            ..hello(2, 3)
        },
    )
    .unwrap_err();
    let error = gathering
        .join()
        .unwrap()
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("it runs nccl-spark ?]0;owned?, rank 0"),
        "{error}"
    );
    assert!(
        error.chars().all(|c| c == '\n' || !c.is_control()),
        "{error:?}"
    );
}

/// A rank that listens on all interfaces would also have the port of other addresses.
#[test]
fn rank_0_listens_at_the_given_address_alone() {
    let (rendezvous, port) = open(meeting(0, 2, 20_000));
    let addresses = rendezvous.arrivals.addresses().unwrap();
    assert_eq!(addresses, [SocketAddr::from(([127, 0, 0, 1], port))]);
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err());
    let token = Token::new().unwrap();
    let foreign = Meeting {
        host: "192.0.2.77".into(),
        ..with_token(meeting(29501, 2, 200), &token)
    };
    let error = format!("{:#}", Rendezvous::open(foreign).map(|_| ()).unwrap_err());
    assert!(
        error.starts_with("rank 0 cannot listen at 192.0.2.77:29501: --rendezvous must name"),
        "{error}"
    );
}

/// On Ubuntu a machine's own name is 127.0.1.1, so other machines could not connect.
#[test]
fn with_a_token_rank_0_listens_everywhere_if_its_name_is_loopback_here() {
    let own: Vec<SocketAddr> = vec![SocketAddr::from(([127, 0, 1, 1], 29501))];
    let named = |host: &str, meeting: Meeting| Meeting {
        host: host.into(),
        ..meeting
    };
    let token = Token::new().unwrap();
    let proved = with_token(meeting(29501, 2, 1), &token);
    let places = places_to_listen(&named("spark-1", proved.clone()), own.clone());
    assert!(
        places.len() == 1 && places[0].ip().is_unspecified() && places[0].port() == 29501,
        "{places:?}"
    );
    for kept in [
        named("127.0.1.1", proved.clone()),
        named("localhost", proved),
        named("spark-1", meeting(29501, 2, 1)),
    ] {
        assert_eq!(places_to_listen(&kept, own.clone()), own);
    }
}

#[test]
fn without_a_token_ranks_meet_on_loopback_alone() {
    let outside = |trust| Meeting {
        host: "192.0.2.77".into(),
        trust,
        ..meeting(29501, 2, 1)
    };
    let cures = [
        "SPARK_JOB_TOKEN=",
        "mpirun -x SPARK_JOB_TOKEN",
        "--rendezvous HOST:PORT --without-token",
    ];
    let refused = format!(
        "{:#}",
        Rendezvous::open(outside(trust(None, false)))
            .map(|_| ())
            .unwrap_err()
    );
    let not_dialled = format!(
        "{:#}",
        join(&outside(trust(None, false)), &hello(1, 2)).unwrap_err()
    );
    for error in [&refused, &not_dialled] {
        assert!(
            cures.iter().all(|cure| error.contains(cure)) && !error.contains('\n'),
            "{error}"
        );
    }
    let allowed = format!(
        "{:#}",
        Rendezvous::open(outside(trust(None, true)))
            .map(|_| ())
            .unwrap_err()
    );
    assert!(allowed.starts_with("rank 0 cannot listen at "), "{allowed}");
}
