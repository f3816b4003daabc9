//! What a person types.
