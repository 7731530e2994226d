//! The prompt cache on disk, tested from outside: over a simulated disk that loses power, over real files, and under long campaigns.

mod campaigns;
mod crashes;
mod folders;
mod simulated;
