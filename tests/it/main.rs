//! Behaviour that a user can see, one module each.

mod tidy;
