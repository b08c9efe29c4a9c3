//! The run as JSON, and the bar for a person who watches.

mod common;

use common::{Fake, Said, nccl_spark, say};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

fn run(arguments: &str, fake: &Fake) -> Said {
    let library = fake.library();
    let mut all: Vec<&str> = arguments.split_whitespace().collect();
    all.extend(["--fabric", "verbs", "--plugin", library.to_str().unwrap()]);
    say(&all)
}

#[test]
fn json_has_what_the_table_has() {
    let fake = Fake::compile(&[]);
    let path = fake.folder().join("run.json");
    let said = run(&format!("all-reduce -r 3 -b 64 -e 4096 -f 64 -n 2 --json {}", path.display()), &fake);
    assert_eq!((said.status, said.err.as_str()), (Some(0), ""), "{said:?}");
    let told: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (name, value) in [("collective", "all-reduce"), ("element", "int8"), ("operation", "sum"), ("fabric", "verbs")]
    {
        assert_eq!(told[name], value, "{told}");
    }
    assert_eq!((&told["ranks"], &told["ok"], &told["error"]), (&3.into(), &true.into(), &Value::Null));
    assert_eq!(told["networks"][2]["device"], "Fake0");
    assert_eq!(told["connections"][0][0], "NET/Fake: connected with loopback over 2 rails");
    let rows = told["rows"].as_array().unwrap();
    let table: Vec<_> = said.out.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!((rows.len(), table.len()), (2, 2), "{told}");
    for (row, line) in rows.iter().zip(table) {
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!((row["size_bytes"].to_string(), row["wrong"].to_string()), (cells[0].to_owned(), "0".to_owned()));
        let busbw = row["busbw_gb_s"].as_f64().unwrap();
        assert!((busbw - cells[7].parse::<f64>().unwrap()).abs() < 0.006, "{row} {line}");
        // 2 x (ranks - 1) / ranks.
        assert!((busbw / row["algbw_gb_s"].as_f64().unwrap() - 4.0 / 3.0).abs() < 1e-9, "{row}");
    }
}

#[test]
fn json_on_standard_output_is_alone_there_and_tells_what_went_wrong() {
    let fake = Fake::compile(&[]);
    let said = run("sendrecv -b 4096 -e 4096 -n 2 --json - --rank-env 0:FAKE_CORRUPT=4", &fake);
    let told: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((said.status, &told["ok"], &told["rows"][0]["wrong"]), (Some(1), &false.into(), &1.into()), "{told}");
    assert!(told["rows"][0]["first_wrong"][0].as_str().unwrap().starts_with("rank 0: byte 2048 of rank 1's data"));
    assert!(said.err.contains("# Out of bounds values : 1 FAILED"), "{said:?}");

    let said = run("sendrecv -b 64 -e 64 --json - --rank-env 1:FAKE_FAIL=1", &fake);
    let told: Value = serde_json::from_str(&said.out).unwrap();
    assert!(told["error"].as_str().unwrap().contains("rank 1: channel 0: isend returned"), "{told}");
    assert_eq!((said.status, &told["ok"]), (Some(1), &false.into()), "{told}");

    let said = run("sendrecv --json /no/such/folder/x", &fake);
    assert!(said.status == Some(1) && said.err.starts_with("nccl-spark: --json /no/such/folder/x: "), "{said:?}");
}

/// On a terminal there is a bar, elsewhere (as everywhere in these tests) not a byte of it.
#[test]
fn a_person_who_watches_sees_a_bar() {
    let fake = Fake::compile(&[]);
    let terminal = nix::pty::openpty(None, None).unwrap();
    let mut command = nccl_spark();
    command.args(["all-gather", "--fabric", "verbs", "-b", "64", "-e", "4096", "-f", "64", "--plugin"]);
    command.arg(fake.library()).env("TERM", "xterm").stdout(Stdio::piped()).stderr(Stdio::from(terminal.slave));
    let mut process = command.spawn().unwrap();
    drop(command);
    let reader = std::thread::spawn(move || {
        let (mut screen, mut part) = (Vec::new(), [0; 4096]);
        let mut master = File::from(terminal.master);
        // The end of a terminal is an error.
        while let Ok(bytes @ 1..) = master.read(&mut part) {
            screen.extend_from_slice(&part[..bytes]);
        }
        String::from_utf8_lossy(&screen).into_owned()
    });
    let mut table = String::new();
    process.stdout.take().unwrap().read_to_string(&mut table).unwrap();
    assert!(process.wait().unwrap().success());
    let screen = reader.join().unwrap();
    assert!(screen.contains("/2 sizes"), "{screen:?}");
    assert!(table.contains("# Out of bounds values : 0 OK") && !table.contains("sizes"), "{table}");
}
