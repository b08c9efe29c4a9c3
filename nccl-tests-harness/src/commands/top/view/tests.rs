use super::*;
use crate::commands::top::look::SkippedProcess;
use crate::commands::top::rates::Flow;
use crate::commands::top::rows::tests::{flow, job};
use host::counters::layout::Direction;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

/// The second rail of the first job is lost. The second rail of the second job is slow.
fn snapshot() -> Snapshot {
    let gigabyte = 1_000_000_000;
    let sending_flow = |rail: &str, bytes| flow(rail, "spark-b", Direction::Send, bytes);
    let mut lost = sending_flow("rocep1s0f1:1", 0);
    lost.side.carrying = 0;
    let mut first = job(4711, vec![sending_flow("rocep1s0f0:1", 5 * gigabyte), lost]);
    first.seen.rank = Some(1);
    let second = job(
        4712,
        vec![
            sending_flow("rocep1s0f0:1", 10 * gigabyte),
            sending_flow("rocep1s0f1:1", gigabyte),
        ],
    );
    Snapshot {
        jobs: vec![first, second],
        ..Snapshot::default()
    }
}

fn view(snapshot: Snapshot) -> View {
    let mut view = View::new(false, Duration::from_secs(2), true);
    view.show(snapshot);
    view
}

fn screen(view: &View, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| view.draw(frame.area(), frame.buffer_mut()))
        .unwrap();
    terminal.backend().buffer().clone()
}

fn text(view: &View, width: u16, height: u16) -> Vec<String> {
    let buffer = screen(view, width, height);
    let line = |y| {
        (0..width)
            .map(|x| buffer[(x, y)].symbol())
            .collect::<String>()
            .trim_end()
            .to_owned()
    };
    (0..height).map(line).collect()
}

fn press(view: &mut View, code: KeyCode) -> bool {
    view.press(KeyEvent::new(code, KeyModifiers::NONE), 8)
}

#[test]
fn a_wide_terminal_shows_all_columns() {
    let lines = text(&view(snapshot()), 160, 9);
    assert_eq!(lines[0], "nccl-spark top: 2 jobs, every 2 s, by pid");
    assert!(
        columns::ALL
            .iter()
            .all(|column| lines[1].contains(column.name)),
        "{lines:#?}"
    );
    let words = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        words(&lines[2])[..5],
        ["!4711", "python3", "rank", "1", "40.0"]
    );
    assert_eq!(
        words(&lines[3])[..5],
        ["rocep1s0f0:1", "40.0", "0", "100.0", "1/1"]
    );
    assert_eq!(
        words(&lines[4])[..6],
        ["!", "rocep1s0f1:1", "0", "0", "0.0", "0/1"]
    );
    assert_eq!(words(&lines[7])[..3], ["~", "rocep1s0f1:1", "8.00"]);
    assert_eq!(lines[8], "q end  p pause  s order  d peers  ? help");
}

#[test]
fn a_narrow_terminal_keeps_the_most_important_columns() {
    let lines = text(&view(snapshot()), 80, 24);
    assert!(
        lines[1].contains("out Gb/s")
            && lines[1].contains("carry")
            && !lines[1].contains("stalled s"),
        "{lines:#?}"
    );
    assert_eq!(
        text(&view(snapshot()), 20, 5),
        [
            "nccl-spark top: 2 jo",
            " job, rail  out Gb/s",
            "!4711 pytho     40.0",
            " cep1s0f0:1     40.0",
            "q end  p pause  s or"
        ]
    );
    assert_eq!(text(&view(snapshot()), 20, 1), ["!4711 pytho     40.0"]);
    assert_eq!(text(&view(snapshot()), 5, 2), [" job,", "!4711"]);
}

/// The second of a Spark's four rails is lost. At every width from 20 columns on, the end of each
/// rail's name is readable in exactly one row.
#[test]
fn rails_stay_distinguishable_in_narrow_terminals() {
    let rails = [
        "rocep1s0f0:1",
        "roceP2p1s0f0:1",
        "rocep1s0f1:1",
        "roceP2p1s0f1:1",
    ];
    let mut flows: Vec<Flow> = rails
        .iter()
        .map(|rail| flow(rail, "spark-b", Direction::Send, 1 << 30))
        .collect();
    flows[1].side.carrying = 0;
    let mut view = view(Snapshot {
        jobs: vec![job(4711, flows)],
        ..Snapshot::default()
    });
    for by_peer in [false, true] {
        view.by_peer = by_peer;
        let lines = text(&view, 80, 24);
        assert!(
            rails
                .iter()
                .all(|rail| lines.iter().any(|line| line.contains(rail))),
            "{lines:#?}"
        );
        assert!(
            lines[1].contains("losses") && lines[1].contains("stalls"),
            "{lines:#?}"
        );
        let lost = lines.iter().rfind(|line| line.starts_with("! "));
        assert!(
            lost.is_some_and(|line| line.contains("roceP2p1s0f0:1")),
            "{lines:#?}"
        );
        for width in 20..200 {
            let lines = text(&view, width, 24);
            let ends = ["ep1s0f0:1", "P2p1s0f0:1", "ep1s0f1:1", "P2p1s0f1:1"];
            let each = ends
                .iter()
                .map(|end| lines.iter().filter(|line| line.contains(end)).count());
            assert_eq!(each.collect::<Vec<_>>(), [1; 4], "{width}: {lines:#?}");
        }
    }
}

/// Draws an empty, a scrolled and a help screen in many sizes, without a panic and without cells
/// outside the area.
#[test]
fn a_screen_of_any_size_is_drawn() {
    let mut views = vec![
        View::new(true, Duration::from_millis(100), false),
        view(snapshot()),
        view(Snapshot::default()),
    ];
    views[1].scroll = usize::MAX;
    views[2].is_help = true;
    for view in &views {
        for (width, height) in
            (0..24).flat_map(|width| (0..8).map(move |height| (width * 7, height)))
        {
            let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
            view.draw(buffer.area, &mut buffer);
        }
    }
}

#[test]
fn lost_is_red_and_slow_is_yellow_unless_there_are_no_colours() {
    let mut view = view(snapshot());
    let buffer = screen(&view, 100, 9);
    let colours: Vec<Color> = (2..8).map(|y| buffer[(2, y)].fg).collect();
    assert_eq!(
        colours,
        [
            Color::Red,
            Color::Reset,
            Color::Red,
            Color::Reset,
            Color::Reset,
            Color::Yellow
        ]
    );
    view.has_colours = false;
    let buffer = screen(&view, 100, 9);
    let plain = |cell: &ratatui::buffer::Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
    assert!(buffer.content().iter().all(plain));
    let marks: String = (2..8).map(|y| buffer[(0, y)].symbol()).collect();
    assert_eq!(
        marks, "! !  ~",
        "marks show lost and slow rails without colours"
    );
}

#[test]
fn keys_do_what_the_help_says() {
    let mut view = view(snapshot());
    for code in [KeyCode::Char('q'), KeyCode::Esc] {
        assert!(press(&mut view, code));
    }
    let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
    assert_eq!(
        (view.press(control('c'), 8), view.press(control('q'), 8)),
        (true, false)
    );
    assert!(!press(&mut view, KeyCode::Char('?')));
    assert!(
        text(&view, 80, 20)
            .iter()
            .any(|line| line.starts_with("q, Esc, Ctrl-C"))
    );
    assert_eq!(
        (press(&mut view, KeyCode::Esc), view.is_help),
        (false, false)
    );
    press(&mut view, KeyCode::Char('s'));
    assert!(text(&view, 80, 9)[0].ends_with("by rate") && text(&view, 80, 9)[2].contains("4712"));
    press(&mut view, KeyCode::Char('d'));
    assert!(text(&view, 80, 12)[3].starts_with("  spark-b"));
    press(&mut view, KeyCode::Char('p'));
    view.show(Snapshot::default());
    assert!(text(&view, 80, 9)[0].ends_with("PAUSED") && text(&view, 80, 9)[2].contains("4712"));
    press(&mut view, KeyCode::Char('p'));
    view.show(Snapshot::default());
    assert_eq!(
        text(&view, 80, 9)[2],
        "no job here uses NCCL over this plugin"
    );
}

#[test]
fn scrolling_stays_within_the_table() {
    let mut view = view(snapshot());
    let top = |view: &View| text(view, 60, 8)[2].clone();
    for (code, pid) in [
        (KeyCode::Up, true),
        (KeyCode::Down, false),
        (KeyCode::Down, false),
        (KeyCode::Up, true),
    ] {
        press(&mut view, code);
        assert_eq!(top(&view).contains("4711"), pid, "{code:?}");
    }
    press(&mut view, KeyCode::End);
    assert_eq!((view.scroll, top(&view).contains("4711")), (1, false));
    press(&mut view, KeyCode::Down);
    assert_eq!(view.scroll, 1, "scrolling stops at the last row");
    press(&mut view, KeyCode::PageUp);
    press(&mut view, KeyCode::PageDown);
    assert_eq!(view.scroll, 1);
    press(&mut view, KeyCode::Home);
    assert_eq!(view.scroll, 0);
}

#[test]
fn the_last_line_counts_unreadable_processes() {
    let passed_over = vec![SkippedProcess {
        pid: 3,
        reason: "layout 9".to_owned(),
    }];
    let mut shown = view(Snapshot {
        hidden: 5,
        passed_over: passed_over.clone(),
        ..Snapshot::default()
    });
    assert!(text(&shown, 100, 6)[5].starts_with("5 processes of other users cannot be read: "));
    assert!(text(&shown, 100, 6)[5].ends_with(" (and 1 more message)"));
    shown.show(Snapshot {
        passed_over,
        ..Snapshot::default()
    });
    assert_eq!(text(&shown, 100, 6)[5], "process 3: layout 9");
}

#[test]
fn jobs_are_sorted_by_the_chosen_column() {
    let sending_job = |pid, rank, bytes| {
        let mut job = job(pid, vec![flow("r0", "b", Direction::Send, bytes)]);
        job.seen.rank = rank;
        job
    };
    let snapshot = Snapshot {
        jobs: vec![
            sending_job(1, None, 5),
            sending_job(2, Some(1), 9),
            sending_job(3, Some(0), 7),
        ],
        ..Snapshot::default()
    };
    let pids = |order: Order| {
        let mut jobs = rows::of_snapshot(&snapshot, false);
        order.sort(&mut jobs);
        jobs.iter().map(|(job, _)| job.seen.pid).collect::<Vec<_>>()
    };
    assert_eq!(
        (pids(Order::Pid), pids(Order::Rate), pids(Order::Rank)),
        (vec![1, 2, 3], vec![2, 3, 1], vec![3, 2, 1])
    );
    assert_eq!(Order::Pid.next().next().next(), Order::Pid);
    assert_eq!(
        [Order::Pid, Order::Rate, Order::Rank].map(Order::name),
        ["pid", "rate", "rank"]
    );
}
