//! A TCP connection with itself, for unit tests of several crates.

use std::net::{TcpListener, TcpStream};

/// Returns the two ends of a new TCP connection.
pub fn tcp_pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one, listener.accept().unwrap().0]
}
