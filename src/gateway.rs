//! THE REQUEST PATH: identify, find, admit, forward | answer.
