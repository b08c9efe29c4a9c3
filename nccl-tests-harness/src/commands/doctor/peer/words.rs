//! What the two doctors say to each other: who opens a connection shows a token, then one asks and the other answers.

use super::neighbours::Neighbour;
use super::sheet::Sheet;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::io::Read;
use std::time::Duration;

/// The version of these messages; it grows when one changes. [`Opening`] and [`Welcome`] stay, so that each side can say what is wrong.
pub const PROTOCOL: u32 = 1;
/// The first word of the line by which a partner says where it is.
pub const PARTNER_WORD: &str = "nccl-spark-partner";
/// How long whoever opens a connection may take to show the token, and the partner to answer.
pub const OPENING: Duration = Duration::from_secs(10);

/// The first message on each connection to a partner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Opening {
    /// [`PROTOCOL`] of who connects.
    pub protocol: u32,
    /// The token.
    pub token: String,
}

/// The answer to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Welcome {
    /// The token is right.
    Welcome,
    /// It is not, or the versions differ.
    Refused {
        /// Why.
        why: String,
    },
}

/// What the partner is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    /// For what it knows of its host.
    Sheet,
    /// To take part in a measurement by these rails of its host.
    Measure {
        /// Their names, as the sheet has them.
        rails: Vec<String>,
    },
    /// For the hardware addresses that its host has for others.
    Neighbours,
}

/// What the partner answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Told {
    /// To [`Ask::Sheet`].
    Sheet(Box<Sheet>),
    /// To [`Ask::Measure`]: whoever shows this token becomes the control connection of its rank.
    Ready {
        /// Good for one connection.
        token: String,
        /// What these rails carry in payload, in Mb/s, as far as their host knows.
        expected_mbps: Option<f64>,
    },
    /// To [`Ask::Neighbours`].
    Neighbours(Vec<Neighbour>),
    /// It cannot do that.
    Failed {
        /// Why.
        why: String,
    },
}

/// A secret that is good for one connection.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A new one, of 128 random bits.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
        random.context("read /dev/urandom for a token")?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// One as a person gives it.
    ///
    /// # Errors
    /// What is allowed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex { Ok(Self(text.to_owned())) } else { Err("a token has 32 hexadecimal digits".to_owned()) }
    }

    /// The token as it is sent.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Whether `shown` is this token. How long that takes says nothing about where they differ.
    pub fn is(&self, shown: &str) -> bool {
        let (own, other) = (Sha256::digest(&self.0), Sha256::digest(shown));
        own.iter().zip(other.iter()).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_itself_alone() {
        let (one, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert!(one.is(one.text()) && !one.is(other.text()) && !one.is("") && !one.is(&one.text()[..31]));
        assert_eq!(Token::parse(&format!(" {}\n", one.text())), Ok(one.clone()));
        assert!(Token::parse("secret").is_err() && Token::parse(&"g".repeat(32)).is_err());
        assert_eq!(format!("{one:?}"), "Token(..)");
    }
}
