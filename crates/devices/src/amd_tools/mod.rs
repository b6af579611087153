//! What AMD's tools print, in each of their forms, and the tools as sources.
