//! What an operator asks a running process.
