//! The port of a partner: one address, one token at a time, and whoever connects without it is turned away. No connection that has not
//! shown the token keeps another one waiting.

use super::line::Line;
use super::words::{OPENING, Opening, PROTOCOL, Token, Welcome};
use anyhow::{Context, Result, bail};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So many connections may be without a token at once; more are closed.
const STRANGERS: usize = 64;
/// How long to wait after the system refused a connection.
const PAUSE: Duration = Duration::from_millis(50);

/// A partner's port.
pub struct Admission {
    /// Where it is.
    pub address: SocketAddr,
    token: Arc<Mutex<Option<Token>>>,
    admitted: mpsc::Receiver<TcpStream>,
}

impl Admission {
    /// Listens on a port of the system's choice.
    ///
    /// # Errors
    /// When that address is none of this host's.
    pub fn open(address: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).with_context(|| format!("listen on {address}"))?;
        let address = listener.local_addr().context("ask for the port")?;
        let token: Arc<Mutex<Option<Token>>> = Arc::default();
        let (admitted_in, admitted) = mpsc::channel();
        let shared = Arc::clone(&token);
        std::thread::spawn(move || take_all(&listener, &shared, &admitted_in));
        Ok(Self { address, token, admitted })
    }

    /// A new token, which is good for one connection. An earlier one that nobody has shown is no longer good.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn expect_one(&self) -> Result<Token> {
        let token = Token::new()?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        Ok(token)
    }

    /// The connection that has shown the token.
    ///
    /// # Errors
    /// When none has by `end`.
    pub fn next(&self, end: Instant) -> Result<TcpStream> {
        match self.admitted.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(stream) => Ok(stream),
            Err(RecvTimeoutError::Timeout) => bail!("nobody connected to {} in time", self.address),
            Err(RecvTimeoutError::Disconnected) => bail!("the port {} is closed", self.address),
        }
    }
}

fn take_all(listener: &TcpListener, token: &Arc<Mutex<Option<Token>>>, admitted: &mpsc::Sender<TcpStream>) {
    let strangers = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        if strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS {
            strangers.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (token, admitted, strangers) = (Arc::clone(token), admitted.clone(), Arc::clone(&strangers));
        std::thread::spawn(move || {
            // A connection that is not admitted has been told why, if it could be.
            if let Ok(stream) = admit(stream, &token) {
                let _ = admitted.send(stream);
            }
            strangers.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

fn admit(stream: TcpStream, token: &Mutex<Option<Token>>) -> Result<TcpStream> {
    let mut line = Line::new(stream, "whoever connected", Instant::now() + OPENING)?;
    let opening: Opening = line.hear(OPENING)?;
    let mut refuse = |why: String| -> Result<TcpStream> {
        line.say(&Welcome::Refused { why: why.clone() })?;
        bail!(why)
    };
    if opening.protocol != PROTOCOL {
        return refuse(format!(
            "this doctor has version {PROTOCOL} of the messages, the other one {}: install the same nccl-spark on both hosts",
            opening.protocol
        ));
    }
    let is_right = {
        let mut expected = token.lock().unwrap_or_else(PoisonError::into_inner);
        let is_right = expected.as_ref().is_some_and(|token| token.is(&opening.token));
        if is_right {
            *expected = None;
        }
        is_right
    };
    if !is_right {
        return refuse("the token is wrong, or was used before: each start of a partner has a new one".to_owned());
    }
    line.say(&Welcome::Welcome)?;
    Ok(line.into_stream())
}

/// Shows a partner the token, over a connection that is not used yet.
///
/// # Errors
/// When it is refused, or the other end is no partner.
pub fn show_token(line: &mut Line, token: &str) -> Result<()> {
    line.say(&Opening { protocol: PROTOCOL, token: token.to_owned() })?;
    match line.hear(OPENING)? {
        Welcome::Welcome => Ok(()),
        Welcome::Refused { why } => bail!("{} refused this doctor: {}", line.whom(), super::sheet::plain(&why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn dial(admission: &Admission) -> Line {
        Line::new(TcpStream::connect(admission.address).unwrap(), "the partner", far()).unwrap()
    }

    #[test]
    fn a_token_opens_one_connection_and_who_has_none_keeps_nobody_waiting() {
        let admission = Admission::open([127, 0, 0, 1].into()).unwrap();
        let silent = dial(&admission);
        let wrong = |token: &str| show_token(&mut dial(&admission), token).unwrap_err().to_string();
        // Nobody is expected yet.
        assert!(wrong("").contains("the token is wrong"));
        let stale = admission.expect_one().unwrap();
        let token = admission.expect_one().unwrap();
        assert!(wrong(stale.text()).contains("the token is wrong"));
        let mut noise = TcpStream::connect(admission.address).unwrap();
        noise.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut good = dial(&admission);
        show_token(&mut good, token.text()).unwrap();
        let admitted = admission.next(far()).unwrap();
        Line::new(admitted, "the other", far()).unwrap().say(&7).unwrap();
        assert_eq!(good.hear::<u8>(Duration::from_secs(60)).unwrap(), 7);
        assert!(wrong(token.text()).contains("was used before"));
        let error = admission.next(Instant::now() + Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("nobody connected"), "{error}");
        drop(silent);
    }

    #[test]
    fn another_version_is_told_so() {
        let admission = Admission::open([127, 0, 0, 1].into()).unwrap();
        let token = admission.expect_one().unwrap();
        let mut line = dial(&admission);
        line.say(&Opening { protocol: PROTOCOL + 1, token: token.text().to_owned() }).unwrap();
        let Welcome::Refused { why } = line.hear(OPENING).unwrap() else { panic!("it was admitted") };
        assert!(why.contains("version 1") && why.contains("the other one 2"), "{why}");
    }

    #[test]
    fn many_strangers_do_not_take_the_port() {
        let admission = Admission::open([127, 0, 0, 1].into()).unwrap();
        let token = admission.expect_one().unwrap();
        let mut strangers: Vec<Line> = (0..STRANGERS + 8).map(|_| dial(&admission)).collect();
        // Those beyond the limit are closed at once; when the others go, there is room again.
        let closed = strangers.last_mut().unwrap().hear::<u8>(Duration::from_secs(60)).unwrap_err();
        assert!(closed.to_string().contains("closed the connection") || format!("{closed:#}").contains("gone"));
        drop(strangers);
        let is_admitted = || show_token(&mut dial(&admission), token.text()).is_ok();
        let until = far();
        while !is_admitted() {
            assert!(Instant::now() < until, "there is no room");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
