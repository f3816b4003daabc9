//! The admin pages as a client sees them.
