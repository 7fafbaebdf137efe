"""Groups placed by Ray: ``weft up FILE --on ray``. Needs the extra ``weft[ray]``.

    weft up ──creates──► fleet actor ◄──records── group actor ──starts──► weft engine
       │                    ▲                        (one per host of a group, restarted by Ray)
       ╰── API server ──────╯ reads records, wants groups

Ray decides where groups run and restarts them. Everything that concerns requests stays in Weft.
"""
