//! Replaces the plugin's `comm/threads.rs`: no model has signals or processors.

/// Starts a thread.
pub fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map(drop)
}
