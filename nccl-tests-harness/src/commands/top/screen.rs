//! `nccl-spark top` in the terminal: draws, waits for keys, and restores the terminal at the end,
//! also after an error, a panic or a signal. Only a second signal leaves the terminal as it is,
//! because it ends the program immediately.

use super::session::{SLICE, Session, after};
use super::view::View;
use crate::interrupt;
use anyhow::{Context, Result};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use std::time::Instant;

/// Restores the terminal when dropped. On a panic, the hook of `ratatui::try_init` restores the
/// terminal before the panic's message is printed.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        // A closed terminal needs no restoring.
        let _ = ratatui::try_restore();
    }
}

/// Shows readings until a key or a signal ends the program, or --count readings have been taken.
///
/// # Errors
/// The terminal cannot be used, or a reading fails.
pub fn run(session: &mut Session, mut view: View) -> Result<()> {
    let _restore = Restore;
    let mut terminal = ratatui::try_init().context("prepare the terminal")?;
    view.show(session.read()?);
    let mut next = Instant::now() + session.interval;
    while interrupt::status().is_none() {
        terminal
            .draw(|frame| view.draw(frame.area(), frame.buffer_mut()))
            .context("draw")?;
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            view.show(session.read()?);
            if !session.goes_on() {
                break;
            }
            next = after(next, session.interval);
        } else if event::poll(left.min(SLICE)).context("wait for a key")? {
            // A resize is also an event. The next draw uses the new size.
            if let Event::Key(key) = event::read().context("read a key")?
                && key.kind != KeyEventKind::Release
                && view.press(
                    key,
                    terminal
                        .size()
                        .context("ask for the terminal's size")?
                        .height,
                )
            {
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::{Winsize, openpty};
    use nix::sys::termios::tcgetattr;
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    #[ignore = "panics"]
    fn panics_in_the_terminal() {
        let _restore = Restore;
        let _terminal = ratatui::try_init().unwrap();
        panic!("planted");
    }

    #[test]
    fn a_panic_restores_the_terminal_and_its_message_is_readable() {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(&size, None).unwrap();
        let before = tcgetattr(&pty.slave).unwrap();
        let copy = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut child = Command::new("/proc/self/exe");
        child.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "commands::top::screen::tests::panics_in_the_terminal",
        ]);
        let status = child
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .status()
            .unwrap();
        drop(child);
        assert!(!status.success());
        let after = tcgetattr(&pty.slave).unwrap();
        assert_eq!(
            (before.local_flags, before.input_flags),
            (after.local_flags, after.input_flags)
        );
        drop(pty.slave);
        let mut text = Vec::new();
        // Reading fails with EIO when no process has the other side open.
        let _ = File::from(pty.master).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        let enter = text.find("\x1b[?1049h");
        let leave = text.find("\x1b[?1049l");
        let message = text.find("planted");
        assert!(
            enter.is_some() && enter < leave && leave < message,
            "{text:?}"
        );
    }
}
