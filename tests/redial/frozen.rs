//! A process whose service thread is blocked, for example in the kernel's address resolution. Tests
//! also use it in place of a process that ends.

use nccl_net_spark::comm::Host;
use nccl_net_spark::comm::channel::Channel;
use nccl_net_spark::comm::datapath::context::PathContext;
use nccl_net_spark::comm::datapath::lane::Role;
use nccl_net_spark::comm::datapath::mailbox::Mailboxes;
use nccl_net_spark::comm::datapath::peer::Peer;
use nccl_net_spark::comm::datapath::shared::{NotBorrowed, PathGuard, SharedPath};
use nccl_net_spark::comm::recovery::driver::{Driver, Terms};
use nccl_net_spark::comm::recovery::service::Watch;
use nccl_net_spark::comm::recovery::tcp::Redialling;
use proto::wire::fields::Priority;
use proto::wire::mailbox::MAILBOX_BYTES;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use verbs::Region;

/// A connection whose data path can block the service thread until the `Frozen` is dropped.
pub struct Frozen {
    gate: Arc<Gate>,
    host: Arc<Host>,
    watch: Watch,
    /// Kept open, because closing it would close the connection's TCP.
    _far: TcpStream,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Is {
    #[default]
    Open,
    Shut,
    /// The service thread has arrived at the shut gate, and waits there.
    Reached,
}

#[derive(Default)]
struct Gate {
    is: Mutex<Is>,
    changed: Condvar,
}

impl SharedPath for Gate {
    fn borrow(&self) -> Result<PathGuard<'_>, NotBorrowed> {
        Err(NotBorrowed::Broken)
    }

    fn is_unused(&self) -> bool {
        let mut is = self.is.lock().unwrap();
        while *is != Is::Open {
            *is = Is::Reached;
            self.changed.notify_all();
            is = self
                .changed
                .wait_while(is, |is| *is == Is::Reached)
                .unwrap();
        }
        false
    }
}

impl Gate {
    fn set(&self, is: Is) {
        *self.is.lock().unwrap() = is;
        self.changed.notify_all();
    }
}

impl Frozen {
    /// Adds the connection to the process of `host`. The service thread of that process runs until
    /// [`Frozen::freeze`].
    pub fn new(host: &Arc<Host>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let process = Arc::clone(host.process());
        let context = Arc::new(PathContext {
            peer: Arc::new(Peer::new("nobody".to_owned())),
            registrations: Arc::clone(&process.registrations),
            stall_warn: process.config.data_path.stall_warn,
            waker: host.setup().service.clone(),
            operation: Default::default(),
        });
        let mailboxes = Mailboxes {
            region: Region::new(MAILBOX_BYTES).unwrap(),
            peer_addr: 0,
        };
        let gate = Arc::new(Gate::default());
        let terms = Terms {
            role: Role::Sender,
            priority: Priority::default(),
            first_rail_timeout: Duration::from_secs(60),
        };
        let driver = Driver::new(
            process,
            context,
            gate.clone(),
            terms,
            mailboxes,
            Vec::new(),
            &[],
        );
        let channel = Channel::new(near, listener.local_addr().unwrap()).unwrap();
        let watch = host
            .setup()
            .service
            .watch(channel, driver, |_, _| Ok(Redialling::Never))
            .unwrap();
        Self {
            gate,
            host: Arc::clone(host),
            watch,
            _far: listener.accept().unwrap().0,
        }
    }

    pub fn freeze(&self) {
        self.gate.set(Is::Shut);
        let is = self.gate.is.lock().unwrap();
        drop(
            self.gate
                .changed
                .wait_while(is, |is| *is == Is::Shut)
                .unwrap(),
        );
    }

    pub fn thaw(&self) {
        self.gate.set(Is::Open);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        self.host.setup().service.close(&self.watch);
    }
}
