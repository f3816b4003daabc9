//! The ways in which Redis loses data.

/// How Redis lost data, as a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// Another run of a server answers, or another server: its data may be old or empty.
    Restarted,
    /// A server has forgotten this gateway: it was emptied.
    Emptied,
    /// The state of one key was missing or older than known.
    Key,
}

impl Loss {
    pub(super) const LABELS: [&str; 3] = ["restarted", "emptied", "key"];

    pub(super) fn label(self) -> &'static str {
        match self {
            Loss::Restarted => "restarted",
            Loss::Emptied => "emptied",
            Loss::Key => "key",
        }
    }
}
