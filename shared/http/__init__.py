"""HTTP code both programs share. `client*.py` calls a coordinator; everything else serves requests. No routes."""
