//! A port for one connection, on a network where other programs may find the port. Only a client
//! that proves the port's token in the greeting (`greeting`) is admitted. Then the port closes.

use crate::ranks::greeting::{Answer, Arrival, Arrivals, Trust, greet};
use crate::ranks::line;
use crate::ranks::token::Token;
use anyhow::{Context, Result, ensure};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Maximum number of connections that have not proved the token. Further connections are closed.
const MAX_UNAUTHENTICATED: usize = 64;
/// Time limit for a client to connect. Each answer of the port has the same limit again.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub struct TokenPort {
    pub address: SocketAddr,
    arrivals: Arrivals<()>,
}

impl TokenPort {
    /// Listens on a port that the system chooses. Fails when this host does not have the address.
    pub fn open(address: IpAddr, token: &Token) -> Result<Self> {
        let listener =
            TcpListener::bind((address, 0)).with_context(|| format!("listen on {address}"))?;
        let address = listener.local_addr().context("ask for the port")?;
        let arrivals = Arrivals::new(vec![listener], trust(token), MAX_UNAUTHENTICATED)?;
        Ok(Self { address, arrivals })
    }

    /// Waits for the connection that proves the token, and refuses others. Fails if no connection
    /// with the token comes by `end`.
    pub fn accept_one(self, end: Instant) -> Result<TcpStream> {
        loop {
            ensure!(
                Instant::now() < end,
                "no doctor connected to {} in time",
                self.address
            );
            if let Some(Arrival::Admitted { mut line, .. }) = self.arrivals.next() {
                line.send(&Answer::Welcome(()))?;
                return line.settle();
            }
        }
    }
}

/// Connects to the first of a token port's addresses that answers. Errors name the port by `name`.
/// Fails when no address answers by `end` or within [`CONNECT_TIMEOUT`], or one of the sides does
/// not prove the token.
pub fn connect(
    addresses: &[SocketAddr],
    name: &str,
    token: &Token,
    end: Instant,
) -> Result<TcpStream> {
    let stream = line::connect(addresses, end.min(Instant::now() + CONNECT_TIMEOUT))
        .with_context(|| format!("connect to {name}"))?;
    greet(
        stream,
        [name, "doctor"],
        &trust(token),
        &(),
        CONNECT_TIMEOUT,
    )
    .map(|(stream, ())| stream)
}

fn trust(token: &Token) -> Trust {
    const MISMATCH: &str =
        "the token is wrong, or was used before: each start of a partner has a new one";
    Trust {
        token: Some(token.clone()),
        trusts_anybody: false,
        mismatch: MISMATCH,
        cure: MISMATCH,
    }
}

#[cfg(test)]
mod tests;
